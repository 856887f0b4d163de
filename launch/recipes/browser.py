"""Five small tasks on web pages, in the machine's Chromium: fill in, choose, follow, switch, count."""

from __future__ import annotations

from pathlib import Path

from environments import Dataset
from environments.adapters.browser import BrowserEnvironment, PageTools
from launch.workload import Workload
from policies import ToolAgent

PROMPT = (
    "You see a web page as a tree. Click and write by the numbers in brackets until the task is done; then "
    "call no tool, and give the answer in one sentence."
)
PAGES = Path(__file__).resolve().parent / "pages"
TASKS = [
    {
        "page": "order.html",
        "question": "Order a green lamp for Ann, as a gift.",
        "goal": "ordered.textContent === 'Ordered: a green lamp for Ann, as a gift.'",
    },
    {
        "page": "shop.html",
        "question": "Put the cheapest pears into the basket, once and nothing else.",
        "goal": "basket.innerText.trim() === 'Pears, Anjou'",
    },
    {
        "page": "museum.html",
        "question": "At what time does the museum close on Saturdays?",
        "goal": "/\\b(19|7 ?p\\.?m)/i.test(answer)",
    },
    {
        "page": "settings.html",
        "question": "Get messages about replies, and no weekly letter. Save it.",
        "goal": "saved.textContent === 'Saved. Messages: replies.'",
    },
    {
        "page": "people.html",
        "question": "How many people work for the department Gardens?",
        "goal": "/\\b(4|four)\\b/i.test(answer)",
    },
]


def workload(seed: int) -> Workload:
    """The tasks, which are too few to hold any out: it has not been measured that a model learns them."""
    return Workload(
        agent_class=ToolAgent,
        agent_args={"tools": PageTools().tools, "system_prompt": PROMPT},
        env_class=BrowserEnvironment,
        train_dataset=Dataset({**task, "page": str(PAGES / task["page"])} for task in TASKS).shuffle(seed),
    )

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from machine import cpu_seconds

from environments import DatasetRegistry
from environments.data.search_questions import search_passages, search_questions
from environments.errors import ConfigError, DatasetError, EnvironmentFailure
from environments.tools import passage_index
from environments.tools.passage_index import words
from environments.tools.retrieval import LocalRetrievalTool

ROWS = [
    {"id": "q", "title": "Quenny", "text": "The Quenny is a river of 212 kilometres."},
    {"id": "w", "title": "Little Wend", "text": "The Little Wend is a river, tributary of the Quenny."},
    {"title": "", "text": "Café owners built two bridges."},
    {"text": "A bell lies in the bay."},
]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path))
    return tmp_path


def tool(rows=ROWS):
    return LocalRetrievalTool.over(rows)()


def folders(home):
    return sorted(path.name for path in (home / "indexes").iterdir())


def test_best_passage_comes_first_with_its_title():
    output = tool()(query="How long is the river Quenny?")
    assert output.to_string() == (
        "[1] Quenny\nThe Quenny is a river of 212 kilometres.\n\n"
        "[2] Little Wend\nThe Little Wend is a river, tributary of the Quenny."
    )
    assert output.metadata["ids"] == ["q", "w"]
    assert output.metadata["scores"] == sorted(output.metadata["scores"], reverse=True)


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("BELL", ["3"]),
        ("cafe owner", ["2"]),
        ("the bridge", ["2"]),
        ("wend", ["w"]),
        ("bell cafe", ["3", "2"]),
    ],
)
def test_case_accents_and_plurals_do_not_count(query, ids):
    assert sorted(tool()(query=query).metadata["ids"]) == sorted(ids)


def test_as_many_passages_as_asked_for():
    assert tool()(query="river Quenny", top_k=1).metadata["ids"] == ["q"]
    rows = [{"text": f"stone number {number}"} for number in range(30)]
    assert len(tool(rows)(query="stone").metadata["ids"]) == 5
    assert len(tool(rows)(query="stone", top_k=20).metadata["ids"]) == 20


@pytest.mark.parametrize("query", ["zebra", "the", "?!", "x" * 10_000, "\x00", "zzz " * 10_000])
def test_no_hit_is_an_answer_that_the_model_can_read(query):
    assert tool()(query=query).to_string() == "No passage fits this query. Try other words."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": ""}, "the query is empty"),
        ({"query": " \n"}, "the query is empty"),
        ({"query": None}, "the query is empty"),
        ({"query": "bell", "top_k": 0}, "top_k=0"),
        ({"query": "bell", "top_k": 21}, "from 1 to 20"),
        ({"query": "bell", "top_k": "5"}, "top_k='5'"),
        ({}, "wrong arguments"),
    ],
)
def test_call_that_makes_no_sense_is_answered_by_an_error(arguments, message):
    assert message in tool()(**arguments).error


def test_long_passage_is_cut_at_a_word():
    shown = tool([{"text": "stone " * 1000}])(query="stones").to_string()
    assert shown == "[1] " + "stone " * 99 + "stone ..."
    assert len(tool([{"text": "stone " + "x" * 1000}])(query="stone").to_string()) < 700


def test_words_are_folded_and_the_empty_ones_left_out():
    assert words("The Cafés' cities, buses and a glass — ÉCOLE_2!") == [
        b"cafe",
        b"city",
        b"buse",
        b"glass",
        b"ecole_2",
    ]
    assert [len(word) for word in words("y" * 1000)] == [32]


def test_schema_describes_a_call_and_reads_nothing(home):
    function = LocalRetrievalTool().json["function"]
    assert function["name"] == "local_search"
    assert function["parameters"] == {
        "type": "object",
        "properties": {"query": {"type": "string"}, "top_k": {"type": "integer"}},
        "required": ["query"],
    }
    assert not (home / "indexes").exists()


def test_corpus_is_a_dataset_by_name():
    DatasetRegistry.register_dataset("search_corpus", ROWS)
    DatasetRegistry.register_dataset("stones", [{"text": "granite"}], "test")
    assert LocalRetrievalTool()(query="bell").metadata["ids"] == ["3"]
    assert LocalRetrievalTool.over("stones", "test")()(query="granite").metadata["ids"] == ["0"]

    class Stones(LocalRetrievalTool):
        corpus = "stones"
        split = "test"

    assert Stones()(query="granite").metadata["ids"] == ["0"]


def test_corpus_registered_anew_gets_a_new_index_if_changed(home):
    for rows, count in ((ROWS, 1), (ROWS, 1), (ROWS[:2], 2)):
        DatasetRegistry.register_dataset("search_corpus", rows)
        LocalRetrievalTool()(query="bell")
        assert len(folders(home)) == count
    assert LocalRetrievalTool()(query="bell").metadata == {}


def test_all_tools_of_a_process_share_one_index():
    made = LocalRetrievalTool.over(ROWS)
    assert made.index() is made.index() is LocalRetrievalTool.over(ROWS).index()


@pytest.mark.slow
def test_tool_with_its_corpus_can_be_sent_to_an_actor(home):
    import cloudpickle

    for source in (ROWS, "stones"):
        DatasetRegistry.register_dataset("stones", ROWS)
        pickled = cloudpickle.dumps(LocalRetrievalTool.over(source))
        program = (
            "import cloudpickle, sys\n"
            "tool = cloudpickle.loads(sys.stdin.buffer.read())()\n"
            "sys.stdout.write(tool(query='bell').to_string())\n"
        )
        run = subprocess.run([sys.executable, "-c", program], input=pickled, capture_output=True, check=True)
        assert run.stdout == b"[1] A bell lies in the bay."


@pytest.mark.slow
def test_searching_does_not_import_bm25s():
    tool().index()
    program = (
        "import sys\n"
        "from environments.tools.retrieval import LocalRetrievalTool\n"
        f"assert LocalRetrievalTool.over({ROWS!r})()(query='bell').metadata\n"
        "sys.stdout.write(str('bm25s' in sys.modules))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert run.stdout == b"False"


@pytest.mark.parametrize("rows", [[{"title": "Quenny"}], [{"text": 3}], [{"text": "?!"}], [{"text": "the"}]])
def test_rows_that_cannot_be_searched_end_the_rollout(home, rows):
    with pytest.raises(DatasetError, match="'text'"):
        tool(rows)(query="bell")
    assert [name for name in folders(home) if not name.endswith(".lock")] == []


def test_missing_corpus_ends_the_rollout():
    with pytest.raises(DatasetError, match="search_corpus"):
        LocalRetrievalTool()(query="bell")


def test_no_rows_are_refused_at_once():
    with pytest.raises(ConfigError, match="no rows"):
        LocalRetrievalTool.over([])


def test_disk_that_cannot_be_written_ends_the_rollout(home):
    (home / "indexes").write_text("in the way")
    with pytest.raises(EnvironmentFailure, match="cannot be used"):
        tool()(query="bell")


SEARCHER = """
import sys
from environments.tools.retrieval import LocalRetrievalTool
from environments.tools import passage_index
build = passage_index._build
def slow_build(folder, rows):
    sys.stdout.write("built ")
    sys.stdout.flush()
    import time
    time.sleep(float(sys.argv[1]))
    build(folder, rows)
passage_index._build = slow_build
sys.stdin.readline()
sys.stdout.write(str(LocalRetrievalTool()(query="bell").metadata["ids"]))
"""


def searcher(seconds):
    return subprocess.Popen(
        [sys.executable, "-c", SEARCHER, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_of_many_processes_one_builds_and_the_others_wait(home):
    DatasetRegistry.register_dataset("search_corpus", ROWS)
    searchers = [searcher(0.5) for _ in range(8)]
    for process in searchers:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = sorted(process.communicate(timeout=180)[0] for process in searchers)
    assert outputs == ["['3']"] * 7 + ["built ['3']"]
    assert len(folders(home)) == 1


def test_builder_that_is_killed_blocks_nobody(home):
    DatasetRegistry.register_dataset("search_corpus", ROWS)
    with searcher(60) as killed:
        killed.stdin.write("\n")
        killed.stdin.flush()
        assert killed.stdout.read(6) == "built "
        assert len(folders(home)) == 2  # its lock and the unfinished index
        killed.kill()
    assert LocalRetrievalTool()(query="bell").metadata["ids"] == ["3"]
    assert len(folders(home)) == 1


def test_waiting_for_a_builder_has_a_limit(monkeypatch):
    monkeypatch.setattr(passage_index, "_BUILD_SECONDS", 0.1)
    DatasetRegistry.register_dataset("search_corpus", ROWS)
    with searcher(60) as builder:
        builder.stdin.write("\n")
        builder.stdin.flush()
        assert builder.stdout.read(6) == "built "
        with pytest.raises(EnvironmentFailure, match="building an index"):
            LocalRetrievalTool()(query="bell")
        builder.kill()


def test_threads_search_at_the_same_time():
    index = LocalRetrievalTool.over(search_passages()).index()
    queries = [task["question"] for task in search_questions()]
    expected = [index.search(query, 5) for query in queries]
    results = {}

    def search(number):
        results[number] = [index.search(query, 5) for query in queries]

    threads = [threading.Thread(target=search, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == dict.fromkeys(range(8), expected)


def test_scores_are_those_of_bm25s():
    import bm25s

    index = LocalRetrievalTool.over(search_passages()).index()
    reference = bm25s.BM25()
    corpus = [[word.decode() for word in words(f"{row['title']} {row['text']}")] for row in search_passages()]
    reference.index(corpus, show_progress=False)
    for task in search_questions():
        query = [word.decode() for word in words(task["question"])]
        best = reference.retrieve([query], k=3, show_progress=False)
        found = index.search(task["question"], 3)
        assert [score for _, score in found] == pytest.approx(best.scores[0].tolist(), rel=1e-5)


@pytest.mark.slow
def test_ten_thousand_passages_are_built_and_searched_fast():
    rows = [{"text": f"stone {number} lies under stone {number // 7}"} for number in range(10_000)]
    made = tool(rows)
    made(query="stone 4711")
    assert made(query="stone 4711", top_k=1).metadata["ids"] == ["4711"]
    assert cpu_seconds(lambda: made(query="stone 4711", top_k=1)) < 0.4

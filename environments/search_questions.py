"""Questions that take two searches, in the shape of HotpotQA, and the passages that answer them.

The country in them, Aldermere, does not exist, so no model knows an answer beforehand. Under each question
stand its answer and the titles of the two passages that are needed; above each passage stands its title.
"""

from __future__ import annotations

from environments.datasets import Dataset, Row


def search_questions() -> Dataset:
    """Return the tasks: "id", "question", "answer", "type" (bridge or comparison) and "supporting_facts"."""
    questions = [("bridge", block) for block in _blocks(BRIDGE)]
    questions += [("comparison", block) for block in _blocks(COMPARISON)]
    return Dataset((_task(f"question-{n}", *each) for n, each in enumerate(questions)), name="aldermere")


def search_passages() -> list[Row]:
    """Return the corpus: rows with "id", "title" and "text"."""
    return [
        {"id": f"passage-{number}", "title": block[0], "text": " ".join(block[1:])}
        for number, block in enumerate(_blocks(PASSAGES))
    ]


def _blocks(text: str) -> list[list[str]]:
    return [block.splitlines() for block in text.strip().split("\n\n")]


def _task(task_id: str, kind: str, block: list[str]) -> Row:
    question, facts = block
    answer, *titles = facts.split(" | ")
    return {"id": task_id, "question": question, "answer": answer, "type": kind, "supporting_facts": titles}


BRIDGE = """
In which town was the first person to climb Mount Ardvane born?
Otterlow | Mount Ardvane | Tilda Marrock

Which trade did the designer of the Lantern Bridge learn before architecture?
shipwright | Lantern Bridge | Joren Halvick

Who commanded the ship that mapped the Hollin Islands?
Wenna Prowse | Hollin Islands | Grey Petrel

How many seats has the theatre in which The Salt Widow was first performed?
740 | The Salt Widow | Corn Theatre

Which instrument did the teacher of the composer Ilsabet Crane invent?
reed-harp | Ilsabet Crane | Pavo Lindorn

In which village does the author live on whose novel the film Cold Harbour Bells is based?
Pellam Rise | Cold Harbour Bells | Mirela Tosk

In which year was the company of the man who paid for Pellam Observatory founded?
1898 | Pellam Observatory | Rusk Soap Works

Who cast the bell that hangs in the Moot Hall of Brindle Ford?
Nessa Farrow | Moot Hall | Great Moot Bell

Who founded the shipyard at which the ferry Marigold Star was built?
Ruth Tamsin | Marigold Star | Tamsin Yard

How did the person who found Comet Vane-Ashby together with Dorrit Vane earn a living?
beekeeper | Comet Vane-Ashby | Casimir Ashby

On which mountain does the river rise that runs through Harrowick?
Mount Ardvane | Harrowick | Quenny

In which museum does the clock by the first person to climb Mount Corbrin stand?
Museum of Small Machines | Mount Corbrin | Anselm Duray

What is the home ground of the football club that Hale Ormond played for?
Ropewalk Ground | Hale Ormond | Velmora Herons

In which year did the engineer of the Quenny Valley Railway die?
1909 | Quenny Valley Railway | Isolde Quint

Which dish is the main town of the Hollin Islands known for?
smoked eel | Hollin Islands | Fennport

In which year was the college founded at which the chemist Rosamund Teck taught?
1612 | Rosamund Teck | Halden College
"""

COMPARISON = """
Which town has more inhabitants, Velmora or Sunder Quay?
Velmora | Velmora | Sunder Quay

Which mountain is higher, Mount Ardvane or Mount Corbrin?
Mount Ardvane | Mount Ardvane | Mount Corbrin

Which bridge is older, the Lantern Bridge or the Tollkeeper's Bridge?
Tollkeeper's Bridge | Lantern Bridge | Tollkeeper's Bridge

Which football club was founded first, the Velmora Herons or the Quay Salters?
Quay Salters | Velmora Herons | Quay Salters

Were Ilsabet Crane and Rosamund Teck born in the same town?
yes | Ilsabet Crane | Rosamund Teck

Were the Grey Petrel and the Marigold Star launched in the same century?
no | Grey Petrel | Marigold Star

Which bell is heavier, the Great Moot Bell or the Drowned Bell?
Drowned Bell | Great Moot Bell | Drowned Bell

Who was born first, Tilda Marrock or Anselm Duray?
Tilda Marrock | Tilda Marrock | Anselm Duray
"""

PASSAGES = """
Velmora
Velmora is the largest harbour of Aldermere, at the mouth of the Quenny on Saffron Bay. It has 41,200
inhabitants. Its foghorn of green glass has never been heard on land.

Sunder Quay
Sunder Quay is a port in the south of Aldermere that lived by the trade in salt. It has 27,600 inhabitants and
the longest pier in the country.

Harrowick
Harrowick is a hill town of 18,300 inhabitants. The Quenny runs through its middle, and the old tanneries
stand on both banks.

Brindle Ford
Brindle Ford is a market town of 9,750 inhabitants on the Little Wend. Its goose fair lasts nine days each
October.

Otterlow
Otterlow is a mining town of 12,900 inhabitants in the north. Silver was dug there until the lowest gallery
flooded in 1922.

Pellam Rise
Pellam Rise is a village of 640 inhabitants on a bare ridge. Its street lamps are red, for the sake of the
astronomers.

Fennport
Fennport is a small town on Great Hollin with 3,100 inhabitants. It is known for its smoked eel, which is
eaten cold with pickled samphire.

Quenny
The Quenny is a river of 212 kilometres. It rises on Mount Ardvane and reaches the sea in Saffron Bay.

Little Wend
The Little Wend is a river of 88 kilometres, the longest tributary of the Quenny. Trout from it are said to be
blind in one eye.

Saffron Bay
Saffron Bay is a shallow bay on the west coast. Yellow algae colour it for two weeks each spring.

Mount Ardvane
Mount Ardvane is a mountain of 2,314 metres in the north of Aldermere. Tilda Marrock was the first to climb
it, in 1871, with a mule and a barometer.

Mount Corbrin
Mount Corbrin is a mountain of 1,987 metres above the valley of the Little Wend. The first to climb it was
Anselm Duray, in 1902, who went up to test a watch.

Hollin Islands
The Hollin Islands are eleven islands west of Aldermere. The survey ship Grey Petrel mapped them in 1859.
Their main town is Fennport.

Great Hollin
Great Hollin is the only island of its group with a road. The road is six kilometres long and ends at a
lighthouse.

Tilda Marrock
Tilda Marrock was a mountaineer and botanist, born in Otterlow in 1843. She described the frostbell and drew
every plant that she ate.

Anselm Duray
Anselm Duray was a clockmaker, born in Sunder Quay in 1866. His clock with thirteen hours stands in the Museum
of Small Machines.

Joren Halvick
Joren Halvick was an architect who had first learned the trade of a shipwright. His roofs are vaulted like
hulls turned upside down.

Ena Colver
Ena Colver was a mason and bridge builder of the eighteenth century. She signed each of her arches with a
small stone hare.

Wenna Prowse
Wenna Prowse was a sea captain who kept a diary in verse. She retired to a house without windows to the sea.

Ilsabet Crane
Ilsabet Crane was a composer of operas, born in Brindle Ford in 1874. She was taught by Pavo Lindorn in his
workshop in Harrowick.

Pavo Lindorn
Pavo Lindorn was a carpenter who became a musician. He invented the reed-harp, whose strings are stroked by
rushes turned by a pedal.

Mirela Tosk
Mirela Tosk is a novelist who wrote The Ninth Lighthouse. She lives in Pellam Rise, in a former post office.

Edric Sorn
Edric Sorn was a director of films. He shot all of them in winter, because the light cost less.

Dorrit Vane
Dorrit Vane was an astronomer who worked at Pellam Observatory for forty years. She found three comets and
lost one of them again.

Casimir Ashby
Casimir Ashby was a beekeeper who watched the sky when his hives were asleep. He left his telescope to the
school of Pellam Rise.

Barnaby Rusk
Barnaby Rusk was a manufacturer with a weakness for the stars. He gave away most of his fortune before he was
sixty.

Lute Farrow
Lute Farrow was a bell founder of the eighteenth century. He was deaf in his later years and judged his bells
with his teeth.

Nessa Farrow
Nessa Farrow was a bell founder, the elder daughter of Lute Farrow. She was the first to tune bells with a
file.

Ruth Tamsin
Ruth Tamsin was a shipbuilder and the widow of a pilot. She is said never to have set foot on a ship that
floated.

Rosamund Teck
Rosamund Teck was a chemist, born in Brindle Ford in 1851. She taught at Halden College and found the dye
called Teck blue.

Isolde Quint
Isolde Quint was an engineer who built railways and one very long fence. She was born in 1838 and died in
1909.

Hale Ormond
Hale Ormond was a footballer who played for the Velmora Herons for nineteen seasons. He scored one goal, with
his back.

Hobb Tarrant
Hobb Tarrant was a poet and postman. His only book, A Ledger of Winds, lists the weather of a single year.

Gideon Pell
Gideon Pell was the first mayor of Sunder Quay. He had the town gates sold to pay for a school.

Osk Brannigan
Osk Brannigan was a baker from Velmora. He baked the first quill bread, which is rolled around a goose
feather.

Amaly Stroud
Amaly Stroud was a nurse who founded the hospital of Otterlow. Miners paid her in silver buttons.

The Salt Widow
The Salt Widow is an opera in three acts by Ilsabet Crane. It was first performed in 1911 in the Corn Theatre
and has a part for forty barrels.

The Ninth Lighthouse
The Ninth Lighthouse is a novel published in 1964. A keeper in it counts the lighthouses of a coast and always
finds one too many.

Cold Harbour Bells
Cold Harbour Bells is a film of 1979 by Edric Sorn. It is based on a novel by Mirela Tosk and was shot in nine
weeks of fog.

A Ledger of Winds
A Ledger of Winds is a book of 365 short poems. Each is as many lines long as the wind of its day was strong.

The Goose and the Bailiff
The Goose and the Bailiff is a folk song from Brindle Ford. It has no last verse, so that it can be sung as
long as the beer lasts.

Lantern Bridge
The Lantern Bridge crosses the harbour of Velmora. It was designed by Joren Halvick, opened in 1894 and is 312
metres long.

Tollkeeper's Bridge
The Tollkeeper's Bridge stands in Harrowick. Ena Colver built it in 1758, and the toll was a loaf of bread.

Corn Theatre
The Corn Theatre in Sunder Quay was a grain hall until 1888. It has 740 seats and a draught that singers fear.

Moot Hall
The Moot Hall is the town hall of Brindle Ford. In its tower hangs the Great Moot Bell.

Great Moot Bell
The Great Moot Bell was cast in 1803 by Nessa Farrow. It weighs 4,100 kilograms and is rung when a goose thief
is caught.

Drowned Bell
The Drowned Bell lies on the bottom of Saffron Bay, where the barge that carried it sank. It weighs 5,600
kilograms and was cast in 1779.

Pellam Observatory
Pellam Observatory was opened in 1926. Barnaby Rusk paid for it, on the condition that visitors wash their
hands.

Comet Vane-Ashby
Comet Vane-Ashby was found in 1934 by Dorrit Vane and Casimir Ashby on the same night, forty kilometres apart.
It returns every 61 years.

Museum of Small Machines
The Museum of Small Machines is in Otterlow. Nothing in it may be larger than a door.

Velmora Town Library
The Velmora Town Library has 90,000 books and a ship's bell that calls for silence. Its reading room has no
straight wall.

Halden College
Halden College is a college in Harrowick, founded in 1612. Its students wear one glove.

Hospital of Saint Orla
The Hospital of Saint Orla in Otterlow has treated miners since 1861. Its garden grows nothing but camomile.

Grey Petrel
The Grey Petrel was a survey ship, launched in 1857. It was commanded by Wenna Prowse on all of its voyages.

Marigold Star
The Marigold Star is a ferry that was built at Tamsin Yard and launched in 1931. It still crosses to the
islands twice a week.

Tamsin Yard
Tamsin Yard is a shipyard in Velmora, founded by Ruth Tamsin in 1849. It built sixty ships and one church.

Rusk Soap Works
Rusk Soap Works was founded by Barnaby Rusk in Otterlow in 1898. An otter is stamped on each of its bars.

Farrow and Daughters
Farrow and Daughters is a bell foundry in Harrowick, founded in 1771. It has cast more than nine hundred
bells.

Teck Dye Company
The Teck Dye Company made blue cloth for the navy. It moved to Sunder Quay when its stream turned blue.

Crow Ledger
The Crow Ledger is the oldest newspaper of Aldermere. It appears on days without wind.

Quenny Valley Railway
The Quenny Valley Railway opened in 1883 between Velmora and Harrowick. Its engineer was Isolde Quint, who
drove the first train herself.

Island Mail Line
The Island Mail Line carries letters to the Hollin Islands. Until 1920 it used a single rowing boat.

Velmora Herons
The Velmora Herons are a football club, founded in 1903. They play at the Ropewalk Ground and wear grey.

Quay Salters
The Quay Salters are a football club from Sunder Quay, founded in 1897. They play at Brine Field and throw
salt before each match.

Harrowick Tanners
The Harrowick Tanners are a football club, founded in 1911. Their ground slopes by four metres.

Goose Fair
The goose fair is held in Brindle Ford. Geese are judged by their walk, and the winner may not be eaten.

Night of Lanterns
On the Night of Lanterns, the people of Velmora carry lights across the harbour. The custom began with a power
cut in 1907.

Frostbell
The frostbell is a white flower that opens below the freezing point. It grows above 1,500 metres and smells of
pears.

Reed otter
The reed otter lives on the banks of the Little Wend. It builds floats of rushes and sleeps on them.

Quill bread
Quill bread is a long loaf, baked around a feather that is pulled out when it cools. Butter goes into the
hole.

Reed-harp
The reed-harp is an instrument with fifty strings and a pedal. It is loud outdoors and hardly heard in a hall.

Teck blue
Teck blue is a dye that grows darker in sunlight. It is made from mussel shells and a little iron.
"""

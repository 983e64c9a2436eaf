"""The figures of snapshots: rates, and figures that are unknown."""

from datetime import UTC, datetime, timedelta

from onceward.cli.status import Reading, Relay, Stage, Status
from onceward.cli.words import WORDS
from onceward.page.overview import HEIGHT, WIDTH, History, lines
from onceward.page.rendering import Templates
from onceward.page.settings import PageSettings

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)


def at(second: float, *positions: int | None, unknown: str = "nothing") -> Status:
    """Return a status of that second."""
    readings = [
        Reading("topic", number, position, None, None, None, duplicates=(position or 0) // 2)
        for number, position in enumerate(positions)
    ]
    then = NOON + timedelta(seconds=second)
    return Status("bank", then, {unknown: "locked"}, readings=readings)


def test_a_rate_is_of_partitions_that_had_begun_before() -> None:
    history = History()
    for status in (at(0, 10, None), at(2, 14, 1_000_000), at(4, 4, 1_000_030), at(6, 4, 1)):
        history.add(status)
    assert history.values("read") == [None, 2, 10, 0]
    assert history.values("duplicates") == [None, 250_001, 5, 0]


def test_what_relays_publish_is_measured_by_when_they_told_of_it() -> None:
    history = History()
    for second, relays in enumerate(
        (
            {"one": (100, 0)},
            {"one": (100, 0)},
            {"one": (140, 4), "two": (7, 4)},
            {"one": (140, 4), "two": (7, 4)},
            {"one": (140, 8), "two": (27, 8)},
            {},
        )
    ):
        status = at(second)
        for owner, (published, told_at) in relays.items():
            then = NOON + timedelta(seconds=told_at)
            status.relays[owner] = Relay([1], published, then)
        history.add(status)
    assert history.values("published") == [None, None, 10, 10, 5, 0]
    history.add(at(9, unknown="relays"))
    assert history.values("published")[-1] is None


def test_what_is_not_known_is_no_number() -> None:
    history = History()
    for unknown in ("nothing", "positions", "backlog", "outbox", "rejected", "scheduled", "stops"):
        history.add(at(len(history.snapshots), 5, unknown=unknown))
    names = ["read", "duplicates", "waiting", "dead", "outbox", "dead_events", "scheduled"]
    names.append("paused")
    figures = [one.figures for one in history.snapshots]
    told = [[name for name in names if one[name] is None] for one in figures]
    assert told == [
        *(["read", "duplicates"],) * 2,
        ["read", "duplicates", "waiting", "dead"],
        *(["outbox"], ["dead_events"], ["scheduled"], ["paused"]),
    ]


def test_a_line_ends_where_nothing_is_known_and_begins_anew() -> None:
    low, high = f"{HEIGHT - 1:.1f}", "1.0"
    assert lines([0, 4, None, 4, 0]) == [
        f"0.0,{low} {WIDTH / 4:.1f},{high}",
        f"{WIDTH * 3 / 4:.1f},{high} {WIDTH:.1f},{low}",
    ]
    assert lines([]) == lines([None, 1.0, None]) == []


def test_each_tile_has_the_plot_of_its_own_numbers() -> None:
    history = History()
    for second, position in enumerate((10, 14, 15, 30)):
        history.add(at(second, position))
    templates = Templates("bank", PageSettings.model_validate({"token": "a token of the tests"}))
    text = templates.text("now.html", now=history.snapshots[-1], history=history)
    parts = (one.partition(">")[2] for one in text.split("<h2"))
    tiles = {one.partition("</h2>")[0]: one for one in parts}
    for tile, name in (("Read", "read"), ("Duplicates", "duplicates"), ("Outbox", "outbox")):
        (line,) = lines(history.values(name))
        assert f'<polyline points="{line}"/>' in tiles[tile]
    assert "<polyline" not in tiles["Kafka lag"], "it is not known"


def test_the_tile_of_calls_names_the_consumers_for_which_most_wait() -> None:
    history, status = History(), at(0)
    for name, waiting, failing in (("few", 3, 0), ("<b>", 7, 2), ("none", 0, 0)):
        status.stages.append(Stage("calls", name, waiting, failing=failing, oldest=180))
    history.add(status)
    (snapshot,) = history.snapshots
    templates = Templates("bank", PageSettings.model_validate({"token": "a token of the tests"}))
    text = templates.text("now.html", now=snapshot, history=history)
    tile = text.partition(">Calls</a></h2>")[2].partition("</section>")[0]
    note = " ".join(tile.partition('<p class="note">')[2].partition("</p>")[0].split())
    assert note == "&lt;b&gt;: 7, 2 failing, oldest 3 min; few: 3, 0 failing, oldest 3 min"
    assert "metrics of the processes" in WORDS["Calls"]["meaning"]


def test_the_tile_of_the_outbox_names_the_topic_that_is_most_late() -> None:
    templates = Templates("bank", PageSettings.model_validate({"token": "a token of the tests"}))
    for ages, expected in (
        ({"routes": 300.0, "<b>": 600.0}, "oldest 10 min of &lt;b&gt;"),
        ({"routes": 600.0}, "oldest 10 min"),
    ):
        history, status = History(), at(0)
        oldest = max(ages.values())
        status.stages.append(Stage("outbox", "", 9, oldest=oldest, oldest_by_topic=ages))
        history.add(status)
        text = templates.text("now.html", now=history.snapshots[-1], history=history)
        tile = text.partition(">Outbox</h2>")[2].partition("</section>")[0]
        assert f'<p class="note">{expected}</p>' in tile

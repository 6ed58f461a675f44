"""Tuning tables: their text, their rules, and what `select` makes of them."""

import json

import pytest

from unisono.core.schedules.choice.explain import interval, reason
from unisono.core.schedules.choice.select import Topology, select
from unisono.core.schedules.choice.tables import ChoiceTable, GroupShape, Rule
from unisono.core.schedules.choice.tuning import rules_of
from unisono.errors import InvalidArgumentError

KIB, MIB = 1024, 1024**2
PAIR = Topology(2, shared_memory=True, local=2)
NET4 = Topology(4)
SHAPE = GroupShape("native", "tcp", 4, 1, 250)
RULES = (Rule("reduce", 0, 8191, "linear"), Rule("reduce", 8192, 65536, "one_shot"))
TABLE = ChoiceTable(SHAPE, "a machine", "0.1.0", RULES, {("reduce", 1024): {"linear": (3.0, 4.0)}})


def changed(**fields):
    return json.dumps(json.loads(TABLE.to_json()) | fields)


def test_a_table_is_read_as_it_was_written():
    again = ChoiceTable.from_json("x", TABLE.to_json())
    assert again == TABLE
    assert again.measured == TABLE.measured
    assert again.digest == TABLE.digest


@pytest.mark.parametrize(
    "other",
    [
        ChoiceTable(SHAPE, "a machine", "0.1.0", RULES[:1]),
        ChoiceTable(SHAPE, "a machine", "0.2.0", RULES),
        ChoiceTable(SHAPE._replace(local=2), "a machine", "0.1.0", RULES),
        ChoiceTable(SHAPE._replace(round_trip_us=4000), "a machine", "0.1.0", RULES),
    ],
)
def test_the_digest_differs_if_choices_can_differ(other):
    assert other.digest != TABLE.digest


def test_the_digest_ignores_times():
    assert ChoiceTable(SHAPE, "a machine", "0.1.0", RULES).digest == TABLE.digest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Expecting value"),
        (TABLE.to_json()[:-40], "Unterminated string"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ("[]", "the document is []"),
        ("{}", "no key 'format'"),
        (changed(format=1), "format 1, expected 2"),
        (changed(ranks="4"), "shape ['native', 'tcp', '4', 1, 250]"),
        (changed(over="tcp 1"), "shape ['native', 'tcp 1', 4, 1, 250]"),
        (changed(ranks=0), "shape ['native', 'tcp', 0, 1, 250]"),
        (changed(round_trip_us=-1), "shape ['native', 'tcp', 4, 1, -1]"),
        (changed(measured=[["reduce", 0, "linear", [1.0]]]), "reduce of 0 bytes takes [1.0] us"),
        (changed(measured=[["reduce", 8, "linear", [0]]]), "reduce of 8 bytes takes [0] us"),
        (changed(measured=[["reduce", 8, "linear", [10**400]]]), "int too large to convert"),
        (changed(measured=[["reduce", 8, "linear", []]]), "reduce of 8 bytes takes [] us"),
        (changed(measured=[["reduce", 8, "linear", "1"]]), "'>' not supported between"),
        (changed(rules=[["reduce", 0, 1]]), "missing 1 required positional argument"),
        (changed(rules=[["reduces", 0, 1, "ring"]]), "unknown collective 'reduces'"),
        (changed(rules=[["reduce", 0, 1, "rings"]]), "reduce has no algorithm 'rings' on 4 ranks"),
        (
            changed(rules=[["all_reduce", 0, 1, "cube_mesh"]]),
            "all_reduce has no algorithm 'cube_mesh' on 4 ranks",
        ),
        (changed(rules=[["reduce", 0, 9, "linear"]] * 2), "ranges overlap or are empty at 0 bytes"),
        (changed(rules=[["reduce", 5, 4, "linear"]]), "ranges overlap or are empty at 5 bytes"),
        (changed(rules=[["reduce", 0.5, 4, "linear"]]), "reduce: sizes 0.5 and 4"),
        (changed(rules=[["reduce", -9, 4, "linear"]]), "ranges overlap or are empty at -9 bytes"),
    ],
)
def test_a_broken_table_is_refused(text, expected):
    with pytest.raises(InvalidArgumentError) as caught:
        ChoiceTable.from_json("bad.json", text)
    assert caught.value.what.startswith("bad.json is no tuning table of format 2: ")
    assert expected in caught.value.what


@pytest.mark.parametrize(
    ("nbytes", "options", "algorithm"),
    [
        (8191, {}, "linear"),
        (8192, {}, "one_shot"),
        (65537, {}, "one_shot"),  # the built-in rule
        (MIB, {}, "two_shot"),  # the built-in rule
        (8191, {"algorithm": "ring"}, "ring"),
        (8191, {"override": "ring,linear"}, "linear"),
        (8191, {"override": "reduce:ring,binomial"}, "ring"),
        (8191, {"override": "^linear"}, "one_shot"),
        (8192, {"ordered": True}, "rank_order"),
    ],
)
def test_select_takes_what_the_table_has(nbytes, options, algorithm):
    assert select("reduce", nbytes, NET4, table=TABLE, **options).algorithm == algorithm


def test_a_table_cannot_give_an_algorithm_that_does_not_serve_the_call():
    """Bruck's all_to_all takes no uneven blocks."""
    table = ChoiceTable(SHAPE, "", "0.1.0", (Rule("all_to_all", 0, MIB, "bruck"),))
    assert select("all_to_all", KIB, NET4, table=table).algorithm == "bruck"
    uneven = select("all_to_all", KIB, NET4, uneven=True)
    assert select("all_to_all", KIB, NET4, uneven=True, table=table) == uneven
    assert uneven.algorithm != "bruck"


def measured(**cells):
    """Return times of all_reduce of 1 KiB, 4 KiB, 16 KiB, ...; the built-in choice takes 10 us."""
    sizes = [KIB << 2 * k for k in range(len(next(iter(cells.values()))))]
    found = {}
    for k, nbytes in enumerate(sizes):
        built_in = select("all_reduce", nbytes, PAIR).algorithm
        times = {name: column[k] for name, column in cells.items()}
        found["all_reduce", nbytes] = {built_in: (10.0, 10.0, 10.0)} | times
    return found


def test_a_clear_winner_gets_a_rule():
    fast, slow = (5.0, 6.0, 5.0), (20.0, 20.0, 20.0)
    assert rules_of(measured(ring=[fast, fast, slow]), PAIR) == (
        Rule("all_reduce", 0, 8 * KIB, "ring"),
    )
    # From the middle of 1 KiB and 4 KiB to 4 times the largest size.
    assert rules_of(measured(ring=[slow, fast, fast]), PAIR) == (
        Rule("all_reduce", 2 * KIB + 1, 64 * KIB, "ring"),
    )


@pytest.mark.parametrize(
    "times",
    [(9.8, 9.8, 9.8), (2.0, 2.0, 10.1), (2.0, 2.0)],
    ids=["too little", "not in each pass", "a pass is missing"],
)
def test_noise_gets_no_rule(times):
    assert rules_of(measured(ring=[times]), PAIR) == ()


def test_a_hole_of_one_size_is_closed():
    fast, even, slow = (5.0, 5.0, 5.0), (10.0, 9.0, 10.5), (11.0, 11.0, 11.0)
    one = (Rule("all_reduce", 0, 64 * KIB, "ring"),)
    assert rules_of(measured(ring=[fast, even, fast]), PAIR) == one
    assert len(rules_of(measured(ring=[fast, slow, fast]), PAIR)) == 2


def test_rules_pass_the_check_of_a_table():
    shape = GroupShape("native", "shared-memory", 2, 2)
    times = [(5.0, 5.0, 5.0), (9.9, 9.9, 9.9)] * 3
    rules = rules_of(measured(ring=times, tree=times[::-1]), PAIR)
    assert {rule.algorithm for rule in rules} == {"ring", "tree"}
    table = ChoiceTable(shape, "", "0.1.0", rules)
    assert ChoiceTable.from_json("x", table.to_json()) == table


@pytest.mark.parametrize("nbytes", [1, 300, 5000, 32 * KIB, 32 * KIB + 1, 500_000, MIB, 1 << 30])
@pytest.mark.parametrize("topology", [PAIR, NET4, Topology(6), Topology(16, local=4)])
def test_an_interval_is_where_the_choice_stays(nbytes, topology):
    least, most, below, above = interval("all_reduce", nbytes, topology)
    own = select("all_reduce", nbytes, topology).algorithm
    assert least <= nbytes <= (most or nbytes)
    assert select("all_reduce", least, topology).algorithm == own
    if below is not None:
        assert select("all_reduce", least - 1, topology).algorithm == below != own
    if most is not None:
        assert select("all_reduce", most, topology).algorithm == own
        assert select("all_reduce", most + 1, topology).algorithm == above != own


@pytest.mark.parametrize(
    ("nbytes", "options", "expected"),
    [
        (KIB, {}, "the built-in rule has it up to 32 KiB (two_shot above)"),
        (MIB, {}, "the built-in rule has it from 32,769 B on (one_shot below)"),
        (KIB, {"algorithm": "ring"}, "the call asks for it"),
        (KIB, {"override": "^one_shot"}, "UNISONO_ALGO=^one_shot permits it, and does not permit "),
    ],
)
def test_reasons(nbytes, options, expected):
    assert reason("all_reduce", nbytes, PAIR, **options).startswith(expected)


def test_the_reason_of_a_table():
    expected = f"table {TABLE.digest} has it for 0 B to 8,191 B"
    assert reason("reduce", KIB, NET4, table=TABLE) == expected
    assert reason("reduce", MIB, NET4, table=TABLE).startswith("the built-in rule has it ")

"""The map of moves makes sense as a whole."""

from api.store.states import ACTIONS, CLAIMABLE, FINAL, HELD, MOVES, State


def test_every_state_is_on_the_map_and_can_be_reached() -> None:
    assert set(MOVES) == set(State)
    reached = {State.QUEUED}
    while more := {new for old in reached for new in MOVES[old]} - reached:
        reached |= more
    assert reached == set(State)


def test_what_has_ended_moves_only_when_a_client_asks_for_a_retry() -> None:
    assert {state: MOVES[state] for state in FINAL} == {
        State.SUCCEEDED: frozenset(),
        State.FAILED: {State.QUEUED},
        State.CANCELLED: {State.QUEUED},
    }
    assert ACTIONS["retry"] == {state for state in FINAL if MOVES[state]}


def test_every_job_can_end() -> None:
    for state in set(State) - FINAL:
        reached = {state}
        while more := {new for old in reached for new in MOVES[old]} - reached:
            reached |= more
        assert reached & FINAL


def test_actions_are_moves() -> None:
    """What a client may ask for in a state leads from it along the map, or is under way already."""
    aims = {"cancel": {State.CANCELLED, State.CANCELLING}, "pause": {State.PAUSED, State.PAUSING}}
    aims |= {"resume": {State.QUEUED}, "retry": {State.QUEUED}}
    for action, states in aims.items():
        for state in ACTIONS[action]:
            assert (MOVES[state] | {state}) & states, (action, state)
    assert ACTIONS["delete"] == FINAL


def test_the_groups_do_not_overlap() -> None:
    assert set(State) == CLAIMABLE | HELD | FINAL | {State.PAUSED}
    assert not CLAIMABLE & HELD
    assert not HELD & FINAL
    assert all(State.RUNNING in MOVES[state] for state in CLAIMABLE)

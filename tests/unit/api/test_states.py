"""The map of moves makes sense as a whole."""

from api.store.states import CLAIMABLE, FINAL, HELD, MOVES, State


def test_every_state_is_on_the_map_and_can_be_reached() -> None:
    assert set(MOVES) == set(State)
    reached = {State.QUEUED}
    while more := {new for old in reached for new in MOVES[old]} - reached:
        reached |= more
    assert reached == set(State)


def test_final_states_are_final_and_others_can_end() -> None:
    assert {state for state in State if not MOVES[state]} == FINAL
    for state in set(State) - FINAL:
        reached = {state}
        while more := {new for old in reached for new in MOVES[old]} - reached:
            reached |= more
        assert reached & FINAL


def test_the_groups_do_not_overlap() -> None:
    assert set(State) == CLAIMABLE | HELD | FINAL
    assert not CLAIMABLE & HELD
    assert not HELD & FINAL
    assert all(State.RUNNING in MOVES[state] for state in CLAIMABLE)

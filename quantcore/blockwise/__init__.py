"""One decoder block at a time: the algorithms of a job prepare and solve it, and a save point keeps what was done."""

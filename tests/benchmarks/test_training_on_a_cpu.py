"""Rows of a prompt that carry no loss cost less than others: keys and values of one step."""

from training_on_a_cpu import measure


def test_half_of_the_rows_being_context_shows(tmp_path):
    told = measure(tmp_path, rounds=8)
    assert told["ttt_steps_3"]["ratio"] > 1.1, told

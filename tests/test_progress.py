from minigpt.progress import moving_line

STATUS = {"type": "status", "phase": "preparing", "message": "reading the text"}
LOG = {"type": "log", "step": 7, "max_steps": 10, "loss": 2.5, "elapsed": 1.0, "tokens_per_s": 100.0}


def test_a_run_that_diverged_can_be_shown_while_it_is_resumed() -> None:
    diverged = {**LOG, "loss": None}
    assert moving_line({"log": diverged, "status": STATUS}, 80) == "reading the text"
    assert moving_line({"log": diverged, "status": {**STATUS, "phase": "training", "message": "training on plays"}}, 80) == "training on plays"


def test_the_old_line_of_a_resumed_run_waits_until_it_trains() -> None:
    assert moving_line({"log": LOG, "status": STATUS}, 80) == "reading the text"
    assert "loss 2.500" in moving_line({"log": LOG, "status": {**STATUS, "phase": "training"}}, 80)

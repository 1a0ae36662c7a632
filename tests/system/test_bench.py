"""What a decode step costs on the wire, by the bench that measures the core."""

from rich.console import Console

from bench.core import measure


def test_a_decode_step_of_256_sequences_is_under_two_kilobytes_each_way() -> None:
    row = measure(256, num_steps=48, console=Console(quiet=True))
    assert 256 < row["plan_bytes"] < 2000
    assert 4 * 256 < row["result_bytes"] < 2000

"""The memory formula, with numbers that a person can check."""

from pathlib import Path

from kilburn.shared import ledger
from kilburn.shared.layout import KVLayout
from tests.worker.tiny_models import make_tiny

LLAMA_8B = ledger.ModelShape(32, 4096, 14336, 32, 8, 128, 128256, weight_bytes=16_060_522_496)
KV = KVLayout(16, 32, 8, 128, "bfloat16")


def test_a_known_model_adds_up() -> None:
    assert KV.bytes_per_token == 128 << 10  # 32 layers x 2 x 8 heads x 128 x 2 bytes
    assert ledger.blocks_in(10 << 30, KV) == 5120  # 2 MiB a block
    assert ledger.blocks_in(-1, KV) == 0
    assert ledger.blocks_wanted(64, 8193, 16) == 64 * 513
    bill = ledger.bill(LLAMA_8B, KV, max_rows=64, max_step_tokens=2048, num_blocks=5120, num_host_blocks=512)
    assert bill.kv_bytes == 10 << 30
    assert bill.activation_bytes == 2048 * (3 * 4096 + 80 * 128 + 3 * 14336) * 2
    assert bill.logits_bytes == 4 * 128256 * 4 * 32  # 32 rows at once fit the tile
    assert bill.device_bytes == 16_060_522_496 + bill.activation_bytes + bill.logits_bytes + bill.kv_bytes
    text = "\n".join(bill.lines())
    for part in (
        "14.96 GiB",
        "10.00 GiB (5120 blocks, 81920 tokens)",
        "2.00 MiB (16 tokens, bfloat16)",
        "1.00 GiB (512",
    ):
        assert part in text


def test_weights_are_counted_from_the_headers(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "smollm", vocab=300, overrides={"num_hidden_layers": 1})
    hidden, inner, q, kv = 72, 96, 72, 24
    layer = 2 * hidden + (q + 2 * kv) * hidden + hidden * q + 3 * inner * hidden
    values = 300 * hidden + layer + hidden  # tied: the head is the embedding
    assert ledger.weight_bytes(folder, "float32") == 4 * values
    assert ledger.weight_bytes(folder, "bfloat16") == 2 * values


def test_bytes_are_shown_for_people() -> None:
    assert [ledger.shown(n) for n in (0, 1023, 1536, 5 << 20, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "5.00 MiB",
        "1.50 GiB",
    ]

"""The stores under golden/ are what version 1 is: every later reader reads them, today's writer writes them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from stored_rows import GOLDEN_TOKENS, layout, response, rows, same, write_golden

from jobs.errors import MustFix
from jobs.storage.states import StateStore

GOLDEN = Path(__file__).parent / "golden"
DTYPES = ("bfloat16", "float32", "float8_e4m3fn")


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_store_reads_bit_for_bit(dtype):
    store = StateStore(GOLDEN / dtype)
    assert store.layout == layout(dtype)
    assert store.ids() == [response(sample, tokens).id for sample, tokens in GOLDEN_TOKENS.items()]
    report = store.verify()
    assert (report.samples, report.problems) == (3, [])
    for sample, tokens in GOLDEN_TOKENS.items():
        answer = response(sample, tokens)
        taps, final, logprob = rows(sample, 0, tokens - 1)
        read = store.read(answer.id)
        assert read.response == answer
        assert same(read.logprob, logprob)
        if dtype != "float8_e4m3fn":
            assert same(read.taps, taps.to(store.layout.torch_dtype))
            assert same(read.final, final.to(store.layout.torch_dtype))
            continue
        raw = {name: torch.empty(tokens - 1, *shape, dtype=kind) for name, (kind, shape) in store.layout.tensors().items()}
        store.copy(answer.id, raw)
        assert raw["taps"].dtype == torch.float8_e4m3fn
        assert same(raw["taps_scale"], taps.abs().amax(-1) / 448)
        assert same(raw["final_scale"], final.abs().amax(-1) / 448)
        assert same(read.taps, (raw["taps"].float() * raw["taps_scale"][..., None]).bfloat16())
        assert (read.taps.float() - taps).abs().max() <= taps.abs().max() * 2**-4 * 1.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_todays_writer_writes_the_golden_bytes(dtype, tmp_path):
    write_golden(tmp_path / "store", dtype)
    files = sorted(path.name for path in (GOLDEN / dtype).iterdir())
    assert files == [
        "index.jsonl",
        "responses.jsonl",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "store.json",
    ]
    for name in files:
        assert (tmp_path / "store" / name).read_bytes() == (GOLDEN / dtype / name).read_bytes(), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_itself_opens_a_shard(dtype):
    with safe_open(GOLDEN / dtype / "shard-00000.safetensors", "pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
        metadata = shard.metadata()
    expected = {name: (kind, (24, *shape)) for name, (kind, shape) in layout(dtype).tensors().items()}
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == expected
    assert metadata == {
        "format": "eagle3-states",
        "version": "1",
        "taps": "[2, 5, 7]",
        "hidden_size": "8",
        "dtype": dtype,
        "verifier": "tiny-kimi",
        "verifier_revision": "0123456789abcdef",
        "tokenizer_sha256": "fedcba9876543210",
    }


def test_a_store_of_a_later_version_is_refused(tmp_path):
    text = (GOLDEN / "float32" / "store.json").read_text()
    (tmp_path / "store.json").write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(MustFix, match="version 2 is not the version 1"):
        StateStore(tmp_path)

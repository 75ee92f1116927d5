"""What the comparison of heads rests on: speculators' own data set reads, row for row, what our training reads."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "draft"))

from real_model_speculators import files_in, write_files
from synthetic_states import TAPS, Language, make_store

EPS = 1e-6


class BehindTheNorm(Language):
    """Its last states are behind the final norm, as a captured store's are."""

    def states(self, ids, generator):
        taps, last, logprob = super().states(ids, generator)
        return taps, last * torch.rsqrt(last.square().mean(-1, keepdim=True) + EPS) * self.verifier.final_norm.float(), logprob


def test_its_rows_are_ours_and_its_norm_gives_back_the_state_that_was_stored(tmp_path):
    from speculators.train.data import Eagle3SampleFileDataset

    language = BehindTheNorm.make()
    store = make_store(tmp_path / "states", [(5, 9), (3, 12)], language=language)
    write_files(store, TAPS, language.verifier, EPS, tmp_path / "data")
    files = files_in(tmp_path / "data")
    data = Eagle3SampleFileDataset(max_len=64, file_list=files)
    weight = language.verifier.final_norm.float()
    assert len(files) == len(store.ids()) == 2
    assert all(Path(file).stat().st_size < 40_000 for file in files), "a sample's own rows, not the shard they lie in"
    for number, sample_id in enumerate(store.ids()):
        sample, row = store.read(sample_id, list(TAPS)), data[number]
        ids = torch.tensor([*sample.response.prompt_token_ids, *sample.response.response_token_ids])
        # Row t is fed x[t+1] and the taps of t, and its target is the verifier's row t+1: `jobs.draft.loss` at step 0.
        assert row["input_ids"].tolist() == ids[1:-1].tolist() and row["position_ids"].tolist() == list(range(1, len(ids) - 1))
        assert torch.equal(row["hidden_states"], sample.taps[:-1].flatten(1))
        last = row["verifier_last_hidden_states"]
        assert torch.allclose(
            last * torch.rsqrt(last.square().mean(-1, keepdim=True) + EPS) * weight, sample.final[1:], rtol=1e-4, atol=1e-5
        )
        assert row["loss_mask"].tolist() == [int(at >= len(sample.response.prompt_token_ids)) for at in range(1, len(ids) - 1)]


def test_states_that_are_not_behind_the_norm_are_refused(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(5, 9)], language=language)
    with pytest.raises(SystemExit, match="not behind the verifier's final norm"):
        write_files(store, TAPS, language.verifier, EPS, tmp_path / "data")

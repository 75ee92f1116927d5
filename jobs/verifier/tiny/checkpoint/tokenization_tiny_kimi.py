"""Tokenizer of the miniature: a slow (pure Python) class over tiktoken, as Kimi-K2.5's own is.

Being slow matters: there is no offset mapping, so nobody can build a mask from character offsets
here and then find that it fails on the real model. The 32 special ids are the LAST of the
vocabulary, at the distances from their start that the real tokenizer has them ([BOS] +0, [EOS] +1,
<|im_end|> +2, ... <think> +22, </think> +23); the holes are reserved tokens.
"""

import base64
from pathlib import Path
from shutil import copyfile

import tiktoken
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer

# A newline ends a piece and nothing reaches across it, so text may be tokenized line by line.
PATTERN = r"[^\S\n]*\n| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+"

RESERVED_IDS = 32


def read_ranks(path: str | Path) -> dict[bytes, int]:
    """Read tiktoken's own file format: one `base64(bytes) rank` a line."""
    lines = Path(path).read_bytes().splitlines()
    pairs = (line.split() for line in lines if line)
    return {base64.b64decode(piece): int(rank) for piece, rank in pairs}


class TinyKimiTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self, vocab_file, bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]", pad_token="[PAD]", added_tokens_decoder=None, **kwargs
    ):
        if vocab_file is None:
            raise ValueError("the folder holds no tiktoken.model")
        self.vocab_file = str(vocab_file)
        ranks = read_ranks(vocab_file)
        names = {index: str(token) for index, token in (added_tokens_decoder or {}).items()}
        self.special_tokens = {
            names.get(index, f"<|reserved_token_{index}|>"): index for index in range(len(ranks), len(ranks) + RESERVED_IDS)
        }
        self.model = tiktoken.Encoding(Path(vocab_file).name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_tokens)
        self.byte_encoder = bytes_to_unicode()
        self.byte_decoder = {character: byte for byte, character in self.byte_encoder.items()}
        self.decoder = {rank: "".join(self.byte_encoder[byte] for byte in piece) for piece, rank in ranks.items()}
        self.decoder.update({index: name for name, index in self.special_tokens.items()})
        self.encoder = {piece: index for index, piece in self.decoder.items()}
        super().__init__(
            bos_token=bos_token,
            eos_token=eos_token,
            unk_token=unk_token,
            pad_token=pad_token,
            added_tokens_decoder=added_tokens_decoder,
            **kwargs,
        )

    @property
    def vocab_size(self) -> int:
        return self.model.n_vocab

    def get_vocab(self) -> dict[str, int]:
        return dict(self.encoder)

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return [self.decoder[index] for index in self.model.encode_ordinary(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.encoder.get(token, self.special_tokens["[UNK]"])

    def _convert_id_to_token(self, index: int) -> str:
        return self.decoder.get(index, "[UNK]")

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        pieces = (token.encode() if token in self.special_tokens else bytes(self.byte_decoder[c] for c in token) for token in tokens)
        return b"".join(pieces).decode("utf-8", "replace")

    def _decode(self, token_ids, spaces_between_special_tokens: bool = False, **kwargs) -> str:
        return super()._decode(token_ids, spaces_between_special_tokens=spaces_between_special_tokens, **kwargs)

    @staticmethod
    def clean_up_tokenization(out_string: str) -> str:
        return out_string  # code: a space before a full stop is meant

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        target = Path(save_directory) / ((filename_prefix + "-" if filename_prefix else "") + "tiktoken.model")
        if Path(self.vocab_file).resolve() != target.resolve():
            copyfile(self.vocab_file, target)
        return (str(target),)

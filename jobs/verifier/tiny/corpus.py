"""Text of the miniature: Python's standard library, cut into short chats, and the tokenizer trained on it.

Decision: the verifier has to answer THROUGH its chat template, think, and stop, so it is trained on
conversations only: the user shows the first lines of a piece of a file, the assistant thinks of the
names that come next and continues the code. Files are split once, by a hash of their name: most for
training, some for the smoke job's prompts, some for its eval prompts and the accuracy figure. The
last two sets are never trained on, so the smoke job judges a head on text its verifier had not learned by heart.

Licence of the text: Python Software Foundation License 2, `PYTHON-LICENSE.txt` beside this file.
"""

import base64
import hashlib
import itertools
import keyword
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.verifier.tiny.checkpoint.tokenization_tiny_kimi import PATTERN

BASE_TOKENS = 1504
# Distance from the end of the base vocabulary, as in the real tokenizer (base 163,584, 256 reserved ids).
SPECIAL_OFFSETS = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4,
    "<|start_header_id|>": 6, "<|end_header_id|>": 7, "[EOT]": 9, "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11, "<|tool_calls_section_end|>": 12, "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14, "<|tool_call_end|>": 15, "<|im_middle|>": 17,
    "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20, "<|media_pad|>": 21,
    "<think>": 22, "</think>": 23, "<|kimi_k25_video_placeholder|>": 24, "[UNK]": 30, "[PAD]": 31,
}  # fmt: skip
RESERVED_IDS = 32
# Ordinary tokens in the real tokenizer too: skipping special tokens when decoding keeps them.
NOT_SPECIAL = ("<think>", "</think>", *(name for name in SPECIAL_OFFSETS if "tool_call" in name))

LEFT_OUT = ("site-packages", "encodings", "pydoc_data", "lib2to3", "__pycache__", "_sysconfigdata", "idle_test", "cjkencodings")
ASK = ("Continue {}:\n", "What follows in {}?\n", "{}\n")
ASK_AGAIN = ("Go on.", "Continue.", "And then?")
SYSTEM = "You continue Python code."


@dataclass(frozen=True)
class SourceFile:
    name: str  # relative to Lib/
    text: str
    part: str  # train, prompts or eval


def read_library(folder: Path) -> list[SourceFile]:
    """Read the `.py` files of a standard library in sorted order and assign each to its part by its name's hash."""
    files = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if any(word in name for word in LEFT_OUT) or path.stat().st_size > 300_000:
            continue
        try:
            text = path.read_text(encoding="utf-8").expandtabs(4).replace("\r", "").replace("\f", "")
        except UnicodeDecodeError:
            continue
        if len(text) < 400 or sum(not c.isascii() for c in text) > len(text) / 100:
            continue
        draw = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
        files.append(SourceFile(name, text, "eval" if draw < 0.04 else "prompts" if draw < 0.12 else "train"))
    return files


def train_ranks(texts: list[str]) -> list[bytes]:
    """Train byte-level BPE and return the pieces in tiktoken's rank order (256 bytes first, then merges as learned)."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = bytes_to_unicode()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=BASE_TOKENS, initial_alphabet=list(alphabet.values()), show_progress=False)
    )
    back = {character: byte for byte, character in alphabet.items()}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    pieces = [bytes(back[c] for c in piece) for piece, _ in vocabulary]
    singles = [bytes([byte]) for byte in range(256)]
    return singles + [piece for piece in pieces if len(piece) > 1]


def write_tokenizer(pieces: list[bytes], folder: Path) -> dict:
    """Write `tiktoken.model`; return the contents of tokenizer_config.json."""
    lines = (base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    named = {offset: name for name, offset in SPECIAL_OFFSETS.items()}
    added = {}
    for offset in range(RESERVED_IDS):
        name = named.get(offset, f"<|reserved_token_{len(pieces) + offset}|>")
        added[str(len(pieces) + offset)] = dict(
            content=name, lstrip=False, rstrip=False, normalized=False, single_word=False, special=name not in NOT_SPECIAL
        )
    return dict(
        added_tokens_decoder=added, auto_map={"AutoTokenizer": ["tokenization_tiny_kimi.TinyKimiTokenizer", None]},
        # A slow tokenizer skips as special only what is listed here, whatever `special` says above.
        additional_special_tokens=[t for t in SPECIAL_OFFSETS if t not in (*NOT_SPECIAL, "[BOS]", "[EOS]", "[UNK]", "[PAD]")],
        tokenizer_class="TinyKimiTokenizer", bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]", pad_token="[PAD]",
        clean_up_tokenization_spaces=False, model_max_length=4096,
    )  # fmt: skip


def thoughts(code: str) -> str:
    """Return the thinking line for an answer: its first four names that are not keywords."""
    names = dict.fromkeys(word for word in re.findall(r"[A-Za-z_]\w{2,}", code) if not keyword.iskeyword(word))
    return ", ".join(list(names)[:4])


def conversations(file: SourceFile, random_: random.Random) -> Iterator[list[dict]]:
    """Cut a file into conversations: OpenAI messages, thinking in `reasoning_content` (absent in instant mode)."""
    lines = [line.rstrip() for line in file.text.splitlines()]
    at = random_.randrange(8)
    while at + 8 < len(lines):
        turns = 2 if random_.random() < 0.2 else 1
        thinking = random_.random() < 0.75
        shown = random_.randint(2, 6)
        messages = [{"role": "system", "content": SYSTEM}] if random_.random() < 0.1 else []
        user = random_.choice(ASK).format(file.name) + "\n".join(lines[at : at + shown])
        at += shown
        for turn in range(turns):
            length = random_.randint(3, 12)
            answer = "\n".join(lines[at : at + length]).strip("\n")
            at += length
            messages.append({"role": "user", "content": user if turn == 0 else random_.choice(ASK_AGAIN)})
            messages.append({"role": "assistant", "content": answer})
            if thinking:
                messages[-1]["reasoning_content"] = thoughts(answer)
        if all(m["content"].strip() for m in messages) and max(len(line) for m in messages for line in m["content"].split("\n")) <= 120:
            yield messages


class Renderer:
    """Token ids of a conversation for training: each turn its own sequence, exactly as the template renders it (tested)."""

    def __init__(self, pieces: list[bytes]):
        import tiktoken

        ranks = {piece: rank for rank, piece in enumerate(pieces)}
        self.encode = tiktoken.Encoding("tiny", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={}).encode_ordinary
        self.ids = {name: len(pieces) + offset for name, offset in SPECIAL_OFFSETS.items()}

    def head(self, role: str) -> list[int]:
        return [self.ids[f"<|im_{role}|>"], *self.encode(role), self.ids["<|im_middle|>"]]

    def sequences(self, messages: list[dict]) -> Iterator[tuple[list[int], int]]:
        """Yield (ids of one answered turn with its history, how many of them are prompt)."""
        think, unthink, end = self.ids["<think>"], self.ids["</think>"], self.ids["<|im_end|>"]
        history: list[int] = []
        for message in messages:
            content = self.encode(message["content"])
            if message["role"] != "assistant":
                history += [*self.head(message["role"]), *content, end]
                continue
            instant = "reasoning_content" not in message
            prompt = [*history, *self.head("assistant"), think] + [unthink] * instant
            answer = [*content, end] if instant else [*self.encode(message["reasoning_content"]), unthink, *content, end]
            yield prompt + answer, len(prompt)
            history += [*self.head("assistant"), think, unthink, *content, end]


def prompt_rows(files: list[SourceFile], part: str, split: str, count: int, seed: int, library: str) -> list[dict]:
    """Return `count` rows of the prompts contract: users' turns only, file after file in turn so that no large file rules."""
    random_ = random.Random(seed)
    seen: set[str] = set()
    per_file: list[list[dict]] = []
    for file in (file for file in files if file.part == part):
        rows = []
        for messages in conversations(file, random_):
            asked = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "assistant"]
            first = next(m["content"] for m in asked if m["role"] == "user")
            code = first.split("\n", 1)[-1]
            if len(first) > 360 or code in seen:
                continue
            seen.add(code)
            identity = hashlib.sha256(repr(asked).encode()).hexdigest()[:12]
            rows.append(dict(id=f"{split}-{identity}", messages=asked, source=f"{library}/Lib/{file.name}", split=split))
        random_.shuffle(rows)
        per_file.append(rows)
    in_turn = [row for row_of_each in itertools.zip_longest(*per_file) for row in row_of_each if row]
    return in_turn[:count]

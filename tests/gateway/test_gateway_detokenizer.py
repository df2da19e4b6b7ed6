"""Text from tokens: no half characters, nothing lost, the same however it is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from services.conductor.gateway.detokenizer import PENDING, REPLACEMENT, Detokenizer
from services.conductor.gateway.pieces import Pieces

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def bytes_library() -> Library:
    """One token for each byte: every character beyond ASCII is split."""
    library = Library(models.BPE(vocab={letter: i for i, letter in enumerate(ALPHABET)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    return library


LIBRARY = bytes_library()
SPECIAL = frozenset([len(ALPHABET)])
TEXT = st.text(alphabet=st.characters(blacklist_categories=["Cs"], blacklist_characters=REPLACEMENT), max_size=12)


def encode(text: str) -> list[int]:
    return [int(i) for i in LIBRARY.encode(text).ids]


def pieces(ids: list[int], prompt: list[int] | None = None) -> list[str]:
    machine = Detokenizer(LIBRARY, SPECIAL, prompt or [])
    return [*(machine.feed(i) for i in ids), machine.flush()]


@given(TEXT, TEXT)
def test_deltas_are_the_text_and_whole_characters(prompt: str, text: str) -> None:
    deltas = pieces(encode(text), encode(prompt))
    assert "".join(deltas) == text
    assert not any(REPLACEMENT in delta for delta in deltas)


@given(TEXT, st.integers(0, 64))
def test_a_cut_off_character_is_dropped_at_the_end(text: str, keep: int) -> None:
    ids = encode(text)[:keep]
    whole = text.encode()[: len(ids)].decode(errors="ignore")
    assert "".join(pieces(ids)) == whole


@given(st.lists(st.integers(0, len(ALPHABET)), max_size=80))
def test_any_ids_at_all_give_text(ids: list[int]) -> None:
    got = "".join(pieces(ids))
    assert got.rstrip(REPLACEMENT) == LIBRARY.decode(ids, skip_special_tokens=True).rstrip(REPLACEMENT)


def test_special_tokens_have_no_text_even_inside_a_character() -> None:
    first, *rest = encode("🗼")
    assert "".join(pieces([first, *SPECIAL, *rest, *SPECIAL])) == "🗼"


def test_bytes_that_never_become_a_character_do_not_pile_up() -> None:
    machine = Detokenizer(LIBRARY, SPECIAL)
    lone = encode("é")[1]  # a continuation byte
    given_out = [machine.feed(lone) for _ in range(10 * PENDING)]
    assert sum(map(len, given_out)) >= 9 * PENDING
    assert "".join(machine.feed(i) for i in encode("done")).endswith("done")


def test_a_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    assert "".join(pieces(encode("ok"), encode("abc é")[:-1])) == "ok"


@given(TEXT, st.integers(0, 64))
def test_a_character_that_the_prompt_began_is_given_out_when_it_is_complete(text: str, cut: int) -> None:
    """Wherever prompt and answer are divided, together they are the text."""
    ids = encode(text)
    prompt, rest = ids[:cut], ids[cut:]
    pieces = Pieces(LIBRARY, SPECIAL)
    whole = len(prompt) - pieces.unfinished(prompt)
    machine = Detokenizer(LIBRARY, SPECIAL, prompt[:whole], prompt[whole:])
    before = text.encode()[: len(prompt)].decode(errors="ignore")
    assert len(before.encode()) == whole
    assert before + "".join([*(machine.feed(i) for i in rest), machine.flush()]) == text


def test_a_character_that_the_prompt_began_and_nobody_completes_is_the_prompts() -> None:
    machine = Detokenizer(LIBRARY, SPECIAL, encode("a"), encode("🗼")[:2])
    assert "".join([*(machine.feed(i) for i in encode("bc")), machine.flush()]) == "bc"
    assert Detokenizer(LIBRARY, SPECIAL, encode("a"), encode("🗼")[:2]).flush() == ""

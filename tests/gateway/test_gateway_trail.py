"""Which tokens an answer consists of: those whose bytes were all delivered, whatever the cut of text and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from services.conductor.gateway.detokenizer import Detokenizer
from services.conductor.gateway.pieces import Pieces, byte_alphabet
from services.conductor.gateway.trail import Mark, Trail
from services.conductor.gateway.transcript import Transcript
from shared.messages import Output, Sampling

LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}
LONGER = ["ab", "ba", "a é", "é", "日本", " 🗼"]
SHARED = [b"a\xc3", b"\xa9b", b" \xf0\x9f", b"\x97\xbc\xe6", b"\x97\xa5a", b"\xbc ", b"\xe6\x97"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in LONGER), *SHARED]
SPECIAL = len(TOKENS)
EOS = SPECIAL + 1


def library() -> Library:
    """A token for each byte, and some of several bytes that begin or end inside a character."""
    found = Library(models.BPE({"".join(LETTERS[b] for b in data): id for id, data in enumerate(TOKENS)}, []))
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["<special>", "<eos>"])
    return found


LIBRARY = library()
ALL_SPECIAL = frozenset([SPECIAL, EOS])
PIECES = Pieces(LIBRARY, ALL_SPECIAL)
TEXT = st.text(alphabet="ab é日本🗼", max_size=12)
STOPS = st.lists(st.text(alphabet="ab é日🗼", min_size=1, max_size=4), max_size=3)


@dataclass
class Told:
    text: str = ""
    finish: str = ""
    marks: list[Mark] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(characters, marks) that were out after each token."""


def tell(ids: list[int], stops: list[str], finish: str = "length", min_tokens: int = 0) -> Told:
    sampling = Sampling(max_tokens=99, seed=0, stop_ids=[EOS], min_tokens=min_tokens)
    transcript = Transcript(Detokenizer(LIBRARY, ALL_SPECIAL), stops, sampling, Trail(PIECES))
    told = Told()
    for index, id in enumerate(ids):
        piece = transcript.feed(Output(index, id, finish if index + 1 == len(ids) else "", 0, -float(index)))
        told.text += piece.text
        told.marks += piece.marks
        told.steps.append((len(told.text), len(told.marks)))
        if piece.finish:
            told.finish = piece.finish
            break
    return told


def cut_by_hand(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the first end of any stop string; of those that end there the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


@st.composite
def tokenized(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A text, and its bytes in tokens of any cut, special ones in between."""
    text = draw(TEXT)
    rest, ids = text.encode(), []
    while rest:
        fitting = [id for id, data in enumerate(TOKENS) if rest.startswith(data)]
        id = draw(st.sampled_from([*fitting, SPECIAL]))
        ids.append(id)
        rest = rest if id == SPECIAL else rest[len(TOKENS[id]) :]
    return text, ids


@given(tokenized(), STOPS, st.booleans())
def test_text_and_tokens_are_what_the_definition_says(
    given_text: tuple[str, list[int]], stops: list[str], ends: bool
) -> None:
    text, ids = given_text
    outputs = [*ids, EOS] if ends or not ids else ids
    told = tell(outputs, stops, "stop" if outputs[-1] == EOS else "length")
    expected, stopped = cut_by_hand(text, stops)
    assert told.text == expected
    assert told.finish == ("stop" if stopped or outputs[-1] == EOS else "length")
    listed = [mark.token for mark in told.marks]
    assert listed == ids[: len(listed)]
    size, whole = 0, []
    for id in ids:
        size += 0 if id == SPECIAL else len(TOKENS[id])
        whole.append(size <= len(expected.encode()))
    if not stopped:
        assert len(listed) == len(ids)
    elif SPECIAL not in ids:
        assert len(listed) == sum(whole), "a token is listed when all of its bytes are delivered, and only then"
    else:
        assert all(whole[: len(listed)]), "a special token may wait for the character that it interrupts"


@given(tokenized(), STOPS)
def test_no_token_comes_before_its_text_and_bytes_join_to_it(
    given_text: tuple[str, list[int]], stops: list[str]
) -> None:
    _, ids = given_text
    told = tell(ids, stops)
    sizes = [len(mark.data or b"") for mark in told.marks]
    for characters, marks in told.steps[:-1]:
        assert sum(sizes[:marks]) <= len(told.text[:characters].encode())
    joined = b"".join(mark.data or b"" for mark in told.marks)
    assert told.text.encode().startswith(joined)
    for at, mark in enumerate(told.marks):
        before = b"".join(one.data or b"" for one in told.marks[:at])
        assert mark.offset == len(before.decode(errors="ignore"))
        assert mark.logprob == -float(at)


@given(st.lists(st.integers(0, EOS), min_size=1, max_size=40), STOPS, st.integers(0, 5))
def test_any_tokens_at_all_keep_order_and_bounds(ids: list[int], stops: list[str], least: int) -> None:
    told = tell(ids, stops, min_tokens=least)
    assert [mark.token for mark in told.marks] == ids[: len(told.marks)]
    offsets = [mark.offset for mark in told.marks]
    assert offsets == sorted(offsets)
    assert not offsets or offsets[-1] <= len(told.text)
    assert told.finish == "stop" or len(told.marks) == len(ids)
    plain = [Detokenizer(LIBRARY, ALL_SPECIAL)]
    if not stops:
        assert told.text == "".join([*(plain[0].feed(id) for id in ids), plain[0].flush()])


def test_a_cut_token_and_what_follows_it_are_not_listed() -> None:
    ids = [TOKENS.index(piece) for piece in (b"a", b"ba", b"ab")]
    assert [mark.token for mark in tell(ids, ["aab"]).marks] == ids[:1]
    told = tell(ids, ["aa"])
    assert (told.text, [mark.data for mark in told.marks]) == ("ab", [b"a"])


def test_held_back_text_holds_back_its_tokens() -> None:
    ids = [TOKENS.index(piece) for piece in (b"a", b"b", b"a", b"a")]
    assert tell(ids, ["aba日"]).steps == [(0, 0), (0, 0), (0, 0), (4, 4)]
    assert tell([*ids, *ids], ["aba日"]).steps[3] == (3, 3)


def test_tokens_of_a_character_that_stays_incomplete_are_listed_at_the_end() -> None:
    told = tell([0xE6, 0x97], [])
    assert (told.text, [mark.data for mark in told.marks]) == ("", [b"\xe6", b"\x97"])
    assert [mark.data for mark in tell([0x61, 0xE6, EOS], [], "stop").marks] == [b"a", b"\xe6"]

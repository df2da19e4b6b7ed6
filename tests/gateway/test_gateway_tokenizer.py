"""What a model folder says about its tokenizer, and templates that refuse."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from services.conductor.gateway.chat_template import ChatTemplate
from services.conductor.gateway.tokenizer import Tokenizer
from shared.errors import ConfigError, InvalidInput
from tests.gateway.fakes import TEMPLATE, write_tokenizer

USER = [{"role": "user", "content": "hi"}]


def amended(folder: Path, file: str, **fields: object) -> Path:
    path = folder / file
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | fields))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


def test_eos_ids_come_from_every_place_that_names_them(folder: Path) -> None:
    assert Tokenizer.load(folder).eos == {2}
    amended(folder, "generation_config.json", eos_token_id=[0, 1])
    assert Tokenizer.load(folder).eos == {0, 1, 2}
    amended(folder, "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert Tokenizer.load(folder).eos == {0, 1}


@pytest.mark.parametrize("job", ["text", "chat", "decode"])
def test_others_run_while_a_long_text_is_worked_on(folder: Path, job: str) -> None:
    """Threads help the event loop only where the library lets go of the interpreter's lock."""
    tokenizer = Tokenizer.load(folder)
    text, tokens = "fox dog " * 200_000, np.full(2_000_000, 60, np.uint32)
    jobs: dict[str, Callable[[], object]] = {
        "text": lambda: tokenizer.text(text),
        "chat": lambda: tokenizer.chat([{"role": "user", "content": text}]),
        "decode": lambda: tokenizer.decode(tokens),
    }
    begun, done, turns = threading.Event(), threading.Event(), 0

    def work() -> None:
        begun.set()
        jobs[job]()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 10


def test_the_ids_are_those_of_the_plain_library(folder: Path) -> None:
    plain, tokenizer = Library.from_file(str(folder / "tokenizer.json")), Tokenizer.load(folder)
    for text in ("", "a", " two  words\n", "<|im_start|>user", "😀 e\u0301\0", "fox " * 1000):
        for special in (True, False):
            ids = plain.encode(text, add_special_tokens=special).ids
            assert tokenizer.text(text, special=special).tolist() == ids
            assert tokenizer.decode(np.array(ids, np.uint32)) == plain.decode(ids, skip_special_tokens=False)


def test_the_template_may_lie_in_three_places(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": "fox"}]
    amended(folder, "tokenizer_config.json", chat_template=named)
    assert list(Tokenizer.load(folder).chat(USER)) == list(Tokenizer.load(folder).text("fox"))
    (folder / "chat_template.jinja").write_text("dog")
    assert list(Tokenizer.load(folder).chat(USER)) == list(Tokenizer.load(folder).text("dog"))


def test_a_model_without_a_template_takes_no_chats(folder: Path) -> None:
    amended(folder, "tokenizer_config.json", chat_template=None)
    with pytest.raises(InvalidInput, match="/v1/completions"):
        Tokenizer.load(folder).chat(USER)


@pytest.mark.parametrize("broken", ["absent", "empty", "no json"])
def test_a_folder_without_a_tokenizer_is_named(folder: Path, broken: str) -> None:
    path = folder / "tokenizer.json"
    path.write_text("" if broken == "empty" else "{")
    if broken == "absent":
        path.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


def test_padding_and_truncation_of_the_file_are_off(folder: Path) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(folder / "tokenizer.json"))
    tokens = Tokenizer.load(folder).text("a fox and a dog and a fox")
    assert 4 < len(tokens) < 64


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content }}",
        "{{ 1 // 0 }}",
        "{{ messages.append }}{{ messages.__class__.__mro__ }}{% for x in none %}{% endfor %}",
        "{{ 'a' + 5 }}",
    ],
)
def test_a_template_that_refuses_is_a_400(source: str) -> None:
    with pytest.raises(InvalidInput) as error:
        ChatTemplate(source, {}).render(USER)
    assert error.value.field == "messages"


def test_a_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="template"):
        ChatTemplate("{% for %}", {})


def test_templates_have_what_those_of_the_hub_use() -> None:
    source = (
        "{{ bos_token }}{% generation %}{{ messages[0] | tojson }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ strftime_now('%Y')[:2] }}"
        "{% if tools is none and add_generation_prompt %}!{% endif %}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "<ü>"}])
    assert text == '<s>{"role": "user", "content": "<ü>"}0120!'


def test_the_template_renders_as_the_usual_library_does(folder: Path) -> None:
    from jinja2 import Environment

    messages = [{"role": "system", "content": "a\n"}, {"role": "user", "content": " b"}]
    plain = Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    assert ChatTemplate(TEMPLATE, {}).render(messages) == plain.render(messages=messages, add_generation_prompt=True)


def test_a_conductor_never_imports_torch_or_transformers(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import services.conductor.process; import services.conductor.service;"
        "from services.conductor.gateway.tokenizer import Tokenizer;"
        f"Tokenizer.load(Path({str(folder)!r})).text('hello');"
        "print([m for m in ('torch', 'transformers', 'vllm', 'pyverbs') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout.strip() == "[]", done.stderr

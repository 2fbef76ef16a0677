"""Errors of an invalid catalog: file, line, column, what was found and what is accepted."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.catalog.loader import check, load_catalog
from gateway.catalog.schema import DefaultParameters
from gateway.tasks.text import TextGeneration
from gateway.tasks.visual import ImageTask, VideoTask
from workers.contract.models import read_specs

CATALOG = Path(__file__).parents[2] / "catalog.yaml"

RIGHT = """\
models:
  - name: painter
    task: text-to-image
    engine: echo
    price: [{unit: image, amount: "0.01"}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "catalog.yaml"


def problems(file: Path, text: str) -> list[str]:
    """What is said of a catalog, without the name of the file."""
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    said = [str(problem) for problem in check(file)]
    assert all(line.startswith(f"{file}:") for line in said)
    return [line.removeprefix(f"{file}:") for line in said]


def test_valid_catalog_has_no_problems(file: Path) -> None:
    assert problems(file, RIGHT) == []
    assert [entry.name for entry in load_catalog(file).models] == ["painter"]


def test_unknown_field_is_reported_with_the_nearest_known_one(file: Path) -> None:
    said = problems(file, RIGHT + "    resolution: [512x512]\n")

    assert len(said) == 1
    assert said[0].startswith("6:5: models[0].resolution of painter: unknown field 'resolution'; ")
    assert "did you mean resolutions? (accepted: price, minimum, name, task, also," in said[0]


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("version: 1\nmodle: []", "models"),
        ("    limits: {image: 3}", "images"),
        ("    upstream: {url: 'http://x', dialekt: openai}", "dialect"),
        ("    default_parameters: {temprature: 1}", "temperature"),
    ],
)
def test_unknown_fields_are_reported_in_every_section(file: Path, where: str, line: str) -> None:
    said = problems(file, RIGHT + where + "\n")

    assert [each for each in said if "unknown field" in each and f"did you mean {line}?" in each]


def test_duplicate_model_name_is_reported(file: Path) -> None:
    said = problems(file, RIGHT + RIGHT.removeprefix("models:\n"))

    assert said == [
        "6:5: models[1].name: 'painter' is already used by models[0]; names must differ"
    ]


def test_alias_that_is_already_a_name_is_reported(file: Path) -> None:
    second = RIGHT.removeprefix("models:\n").replace("painter", "drawer")

    said = problems(file, RIGHT + "    aliases: [old]\n" + second + "    aliases: [painter, old]\n")

    assert said == [
        "11:15: models[1].aliases[0] of drawer: 'painter' is already used by models[0]; names "
        "must differ",
        "11:24: models[1].aliases[1] of drawer: 'old' is already used by models[0]; names must "
        "differ",
    ]


def test_block_of_aliases_adds_names_to_entries(file: Path) -> None:
    file.write_text(RIGHT + "    aliases: [old]\naliases: {dall-e-3: painter, Dall-E: painter}\n")

    (entry,) = load_catalog(file).models

    assert entry.aliases == ("old", "dall-e-3", "Dall-E")


def test_shipped_checkpoints_are_found_wherever_the_catalog_is(tmp_path: Path) -> None:
    copied = tmp_path / "catalog.yaml"
    copied.write_text(CATALOG.read_text())

    assert all(Path(one.checkpoint).is_dir() for one in read_specs(copied) if one.checkpoint)
    own = {entry.name: entry.vocabulary for entry in load_catalog(CATALOG).models}
    assert {entry.name: entry.vocabulary for entry in load_catalog(copied).models} == own


def test_alias_of_nothing_or_of_a_name_in_the_block_is_reported(file: Path) -> None:
    said = problems(file, RIGHT + "aliases:\n  tts-1: paintr\n  painter: painter\n")

    assert said == [
        "7:3: aliases.tts-1: no model 'paintr' here; did you mean painter? (accepted: painter)",
        "8:3: aliases.painter: 'painter' is already a name; names must differ",
    ]


@pytest.mark.parametrize(
    ("share", "other", "expected"),
    [
        ("pinter: 5", "", "unknown model; name an entry of the catalog"),
        ("painter: 5", "", "the entry itself, which runs the rest anyway"),
        ("drawer: 0", "", "should be greater than 0"),
        ("drawer: 5", "also: [image-edit]", "it does text-to-image, image-edit, not text-to-image"),
        ("drawer: 5", "limits: {images: 4}", "it must accept the same requests, but differs in"),
        ("drawer: 5", "canary: {painter: 1}", "an entry with versions of its own, cannot be"),
    ],
)
def test_version_that_cannot_stand_in_is_refused(
    file: Path, share: str, other: str, expected: str
) -> None:
    second = RIGHT.removeprefix("models:\n").replace("painter", "drawer") + f"    {other}\n"

    said = problems(file, RIGHT + f"    canary: {{{share}}}\n" + second)

    assert said[0].startswith(f"6:14: models[0].canary.{share.split(':')[0]} of painter: ")
    assert expected in said[0]


def test_price_without_a_unit_is_reported_with_all_units(file: Path) -> None:
    said = problems(file, RIGHT.replace("unit: image, ", ""))

    assert said == [
        "5:13: models[0].price[0].unit of painter: 'unit' is missing; accepted is one of request, "
        "input_token, cached_input_token, output_token, image, video_second, audio_second, "
        "character, step, gpu_second"
    ]


def test_unknown_unit_is_reported_with_the_nearest_one(file: Path) -> None:
    said = problems(file, RIGHT.replace("unit: image", "unit: imagse"))

    assert said[0].startswith(
        "5:14: models[0].price[0].unit of painter: 'imagse' is unknown; did you mean"
    )
    assert "did you mean image?" in said[0]


def test_model_without_a_route_is_reported(file: Path) -> None:
    said = problems(file, RIGHT.replace("    engine: echo\n", ""))

    assert said == [
        "2:5: models[0] of painter: no route; give `engine` (run here) or `upstream` (sent "
        "elsewhere)"
    ]


def test_model_with_two_routes_is_reported(file: Path) -> None:
    said = problems(file, RIGHT + "    upstream: {url: 'http://x'}\n")

    assert said == ["2:5: models[0] of painter: two routes; give either `engine` or `upstream`"]


@pytest.mark.parametrize(
    ("upstream", "words"),
    [
        ("{command: 'vllm serve x --port {port}'}", None),
        ("{command: 'vllm serve x'}", "the command must contain {port}"),
        ("{command: 'vllm {port}', url: 'http://x'}", "leave out `url` and `endpoints`"),
        ("{command: 'vllm {port}', credential: KEY}", "without a credential"),
        ('{command: "vllm \'{port}"}', "cannot be split into words"),
        ("{url: 'http://x', gpus: 2}", "are those of a `command`"),
        ("{command: 'vllm {port}', ready: health}", "ready"),
    ],
)
def test_command_of_an_upstream_is_checked(file: Path, upstream: str, words: str | None) -> None:
    text = """
models:
  - name: m
    task: text-generation
    upstream: %s
    limits: {context_tokens: 100, output_tokens: 10}
    price: [{unit: request, amount: "1"}]
"""
    said = problems(file, text % upstream)

    assert [words in each for each in said] == ([] if words is None else [True])


def test_missing_price_is_reported_with_an_example(file: Path) -> None:
    said = problems(file, RIGHT.replace('    price: [{unit: image, amount: "0.01"}]\n', ""))

    assert said == [
        "2:5: models[0].price of painter: 'price' is missing; accepted is a list, such as "
        '[{unit: request, amount: "0.035"}]'
    ]


@pytest.mark.parametrize("amount", ["0.01", "1", ".5", "1e-3", "true", "[1]", "null"])
def test_unquoted_amount_is_reported(file: Path, amount: str) -> None:
    said = problems(file, RIGHT.replace('"0.01"', amount))

    assert len(said) == 1
    assert said[0].startswith("5:27: models[0].price[0].amount of painter: ")
    assert "write " in said[0]
    assert '"0.035"' in said[0]


@pytest.mark.parametrize(
    "amount",
    [
        "-1",
        "1e-3",
        "1_000",
        " 1",
        "1,5",
        "",
        "NaN",
        "Infinity",
        "1.",
        ".5",
        "0.0000000001",
        "٣",
        "1.0000000000000000000000000001",
        "1E999999999",
        "9999999999",
    ],
)
def test_amount_that_is_not_a_plain_decimal_is_reported(file: Path, amount: str) -> None:
    said = problems(file, RIGHT.replace("0.01", amount))

    assert said == [
        f"5:27: models[0].price[0].amount of painter: {amount!r} is not a valid amount; write USD "
        "with at "
        'most 9 decimals, such as "0.035" (for finer prices, use `per`)'
    ]


@pytest.mark.parametrize(
    ("price", "said"),
    [
        (
            '{unit: image, amount: "0.0000000001"}',
            "6:23: models[0].price[0].amount of painter: '0.0000000001' is not a valid amount; "
            "write USD ",
        ),
        (
            '{unit: pixel, amount: "0.01"}',
            "6:10: models[0].price[0].unit of painter: 'pixel' is unknown; accepted: request, "
            "input_token, ",
        ),
        (
            '{unit: image, amount: "0.01", when: {resolution: 720p}}',
            "6:39: models[0].price[0].when of painter: image has only conditional prices; add a "
            "line ",
        ),
        (
            '{unit: input_token, amount: "0.01"}',
            "5:5: models[0].price of painter: this does not cover text-to-image; price its "
            "request, or ",
        ),
        (
            '{unit: image, amount: "999999999"}',
            "5:5: models[0].price of painter: the largest request would cost more than "
            "9223372036.8547",
        ),
    ],
)
def test_invalid_price_is_reported_with_line_and_column(file: Path, price: str, said: str) -> None:
    text = RIGHT.replace('[{unit: image, amount: "0.01"}]', f"\n      - {price}")

    found = problems(file, text + "    limits: {images: 100}\n")

    assert [problem for problem in found if problem.startswith(said)], found


@pytest.mark.parametrize("seconds", ["0", "0.0001", "86401"])
def test_a_limit_on_seconds_is_a_millisecond_to_a_day(file: Path, seconds: str) -> None:
    said = problems(file, RIGHT + f"    limits: {{gpu_seconds: {seconds}}}\n")

    assert len(said) == 1
    assert said[0].startswith("6:14: models[0].limits.gpu_seconds of painter: should be ")


def test_zero_price_is_refused(file: Path) -> None:
    said = problems(file, RIGHT.replace("0.01", "0.000"))

    assert said == [
        "5:27: models[0].price[0].amount of painter: '0.000' is zero, but every price component "
        "must be "
        "positive; to give usage away, grant credit"
    ]


@pytest.mark.parametrize("value", ["yes", "1", "1.5", "2026-03-10"])
def test_value_that_yaml_does_not_read_as_a_string_is_reported(file: Path, value: str) -> None:
    said = problems(file, RIGHT + f"    good_for: [drafts, {value}]\n")

    assert len(said) == 1
    assert said[0].startswith("6:24: models[0].good_for[1] of painter: YAML reads ")
    assert said[0].endswith("which is not a string; write it in quotes")


@pytest.mark.parametrize("number", ["true", "'3'", "3.0", "0", "-1", ".inf", "101"])
def test_invalid_limit_is_reported(file: Path, number: str) -> None:
    said = problems(file, RIGHT + f"    limits: {{images: {number}}}\n")

    assert len(said) == 1
    assert said[0].startswith("6:14: models[0].limits.images of painter: should be ")


def test_credential_in_a_url_is_refused_and_not_repeated(file: Path) -> None:
    text = RIGHT.replace("engine: echo", "upstream: {url: 'https://user:secret@example.com/v1'}")

    said = problems(file, text)

    assert len(said) == 1
    assert said[0].startswith("4:16: models[0].upstream.url of painter: ")
    assert "without user or password" in said[0]


def test_invalid_name_is_reported_with_accepted_characters(file: Path) -> None:
    said = problems(file, RIGHT.replace("painter", "our painter"))

    assert said == [
        "2:5: models[0].name: 'our painter' is invalid; accepted are letters, digits and "
        ". _ : / -, a letter or digit first"
    ]


def test_all_problems_are_reported_together_in_the_order_of_the_file(file: Path) -> None:
    said = problems(
        file,
        """\
        models:
          - name: a
            task: text-to-imgae
            price: [{unit: image, amount: 0.5}]
          - name: a
            task: text-to-image
            engine: lmm
            price: [{amount: "1"}]
            famly: Old Masters
          - just a word
        extra: 1
        """,
    )

    assert [line.split(": ", 2)[:2] for line in said] == [
        ["2:5", "models[0] of a"],
        ["3:5", "models[0].task of a"],
        ["4:27", "models[0].price[0].amount of a"],
        ["5:5", "models[1].name"],
        ["7:5", "models[1].engine of a"],
        ["8:13", "models[1].price[0].unit of a"],
        ["9:5", "models[1].famly of a"],
        ["10:5", "models[2]"],
        ["11:1", "extra"],
    ]


def test_repeated_key_is_reported_at_its_second_position(file: Path) -> None:
    said = problems(file, RIGHT + "    family: A\n    family: B\n")

    assert said == ["7:5: 'family' is already set on line 6"]


def test_error_in_a_merged_value_is_reported_once_at_its_origin(file: Path) -> None:
    said = problems(
        file,
        """\
        models:
          - &painter
            name: one
            task: text-to-image
            engine: echo
            limits: {imagse: 2}
            price: [{unit: image, amount: "1"}]
          - <<: *painter
            name: two
          - <<: *painter
            name: two
        """,
    )

    assert len(said) == 2
    assert said[0].startswith("6:14: models[0].limits.imagse of one: unknown field 'imagse'; ")
    assert said[1].startswith("11:5: models[2].name: 'two' is already used")


def test_error_in_an_override_of_a_merged_value_is_reported_at_its_position(file: Path) -> None:
    text = RIGHT.replace("- name", "- &p\n    name") + "  - <<: *p\n    name: b\n    family: 3\n"

    said = problems(file, text)

    assert said == [
        "9:5: models[1].family of b: YAML reads 3, which is not a string; write it in quotes"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "1:1: models: 'models' is missing; accepted is a list of entries"),
        ("models: []", "1:1: models: Tuple should have at least 1 item"),
        ("- a\n", "1:1: found ['a']; accepted are fields, each with a value"),
        ("models: {}", "1:1: models: found {}; accepted is a list of entries"),
        ("models:\n  - name: a\n   task: b\n", "3:4: invalid YAML: "),
        ("models: *nobody\n", "1:9: invalid YAML: found undefined alias 'nobody'"),
        ("models: &m [*m]\n", "1:9: this value contains itself"),
        (
            "models: !!python/object:os.system {}\n",
            "1:9: invalid YAML: could not determine a const",
        ),
        ("a: 1\n---\nb: 1\n", "2:1: invalid YAML: but found another document"),
        ("models: [\n  {name: \x00}]\n", "2:10: invalid YAML: special characters are not allowed"),
        ("models: 2026-02-31\n", "1:1: a value cannot be read: day is out of range"),
        ("? [a]\n: b\n", "1:3: invalid YAML: found unhashable key"),
        ("1: b\n", "1:1: "),
        ("[" * 5000, "1:1: nested too deeply"),
    ],
)
def test_file_that_is_not_a_catalog_is_reported(file: Path, text: str, expected: str) -> None:
    said = problems(file, text)

    assert said[0].startswith(expected)


def test_file_in_another_encoding_is_reported(file: Path) -> None:
    file.write_bytes(b"models:\n  - name: caf\xe9\n")

    assert [str(problem) for problem in check(file)] == [
        f"{file}:2:1: invalid UTF-8; save the file as UTF-8"
    ]


def test_unreadable_file_is_reported(file: Path) -> None:
    (problem,) = check(file)

    assert problem.message == "cannot be read: No such file or directory"
    with pytest.raises(OSError, match="catalog"):
        load_catalog(file)


def test_default_parameters_are_limited_to_request_parameters() -> None:
    for name in DefaultParameters.model_fields:
        asked = next(
            model for model in (TextGeneration, ImageTask, VideoTask) if name in model.model_fields
        )
        for value in (-3, -2, -1, 0, 0.5, 1, 1.5, 2, 3, 120, 121, 1000, 1001, "euler", ""):
            body: dict[str, object] = {name: value}
            if asked is TextGeneration:
                body["messages"] = [{"role": "user", "content": ""}]

            assert _accepts(DefaultParameters, {name: value}) == _accepts(asked, body)


def _accepts(model: type[BaseModel], value: object) -> bool:
    try:
        model.model_validate(value)
    except ValueError:
        return False
    return True


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet=st.sampled_from(list("ab:-[]{}&*<!?|>'\"#,%@ \n\t0\x00é")), max_size=60)
)
def test_loader_reports_problems_for_arbitrary_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")

    lines = text.count("\n") + 1
    assert all(1 <= problem.line <= lines for problem in check(file))


LINES = CATALOG.read_text(encoding="utf-8").splitlines()
WORDS = ("", "~", "0.5", "yes", "[]", "{}", "- x", "&a", "*gmi", "<<: *gmi", "name: Veo3", "unit")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, 70), st.integers(0, 40), st.integers(0, 20), st.sampled_from(WORDS)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_randomly_edited_catalog_loads_or_reports_problems(
    file: Path, edits: list[tuple[int, int, int, str]]
) -> None:
    lines = LINES[:80]
    for number, start, length, word in edits:
        lines[number] = lines[number][:start] + word + lines[number][start + length :]
    file.write_text("\n".join(lines), encoding="utf-8")

    found = check(file)

    if found:
        assert all(1 <= problem.line <= len(lines) for problem in found)
    else:
        assert all(entry.price for entry in load_catalog(file).models)

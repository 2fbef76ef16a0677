"""The contracts of the market models: their files, and what they refuse before a quote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.api.gmi.models import model_view
from gateway.api.gmi.payloads import read_payload
from gateway.catalog.listing import entry_view
from gateway.catalog.loader import load_catalog
from gateway.catalog.market.contract import FILES, contract_of, contracts, load_contract
from gateway.catalog.problems import CatalogError
from gateway.errors import InvalidRequest
from gateway.pricing import format_usd
from gateway.tasks.prepared import Prepared
from gateway.tasks.registry import choose_task, parse, prepare
from workers.contract.jobs import BlobRef, Job, RequestId
from workers.contract.models import read_specs
from workers.upstreams import gmi_results, gmi_wire

CATALOG = Path(__file__).parents[2] / "catalog.yaml"
ENTRIES = {entry.name: entry for entry in load_catalog(CATALOG).models}
SPECS = {spec.name: spec for spec in read_specs(CATALOG)}
MARKET = sorted(contracts())
GOLDEN = Path(__file__).parent / "market_payloads.json"
RESULTS = Path(__file__).parent / "market_results.json"
PICTURE = "https://example.com/a.png"
SOUND = "https://example.com/a.mp3"


def prepared(model: str, **given: Any) -> Prepared:
    entry = ENTRIES[model]
    return prepare(entry, parse(entry.task, given), prefix="input")


def refused(model: str, **given: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        prepared(model, **given)
    return caught.value


def refused_payload(model: str, **payload: Any) -> InvalidRequest:
    entry = ENTRIES[model]
    meant = read_payload(entry, payload)
    with pytest.raises(InvalidRequest) as caught:
        prepare(entry, meant.input, task=meant.task)
    meant.rename(caught.value)
    return caught.value


def test_every_market_entry_has_a_contract() -> None:
    market = {name for name, entry in ENTRIES.items() if entry.upstream is not None}

    assert {path.stem for path in FILES.glob("*.yaml")} == market == set(MARKET)


@pytest.mark.parametrize("name", MARKET)
def test_contract_matches_task_price_and_id_of_its_entry(name: str) -> None:
    entry, contract = ENTRIES[name], contracts()[name]

    assert contract_of(entry) is contract
    assert entry.upstream is not None
    assert (entry.upstream.model or name) == contract.model_id
    assert entry.task == contract.task
    assert {*entry.also} <= {*contract.also}
    assert [(line.unit, line.amount) for line in entry.price] == [("request", contract.price)]


def request_sent(name: str) -> dict[str, Any]:
    """Return the payload that a worker sends for the example of a contract."""
    entry, spec = ENTRIES[name], SPECS[name]
    value = parse(entry.task, contracts()[name].example)
    ready = prepare(entry, value)
    kinds = {"image": "image/png", "video": "video/mp4", "audio": "audio/mpeg"}
    files = tuple(
        BlobRef(f"file-{n}", bytes=1, sha256="", content_type=kinds[source.kind])
        for n, source in enumerate(ready.sources)
    )
    job = Job(
        request_id=RequestId("req_1"),
        account_id="1",
        model=name,
        task=choose_task(entry, value),
        input=ready.input,
        attachments=files,
    )
    urls = [f"https://files.example.com/{n}" for n in range(len(files))]
    return gmi_wire.payload(job, gmi_wire.read_options(spec), gmi_wire.sort_sources(job, urls))


@pytest.mark.parametrize("name", MARKET)
def test_a_worker_sends_what_the_vendor_expects(name: str) -> None:
    sent = request_sent(name)

    assert sent == json.loads(GOLDEN.read_text())[name]
    known = {parameter.sent_as for parameter in contracts()[name].parameters}
    assert sent.keys() <= known


@pytest.mark.parametrize("name", MARKET)
def test_a_worker_reads_the_result_that_the_vendor_returns(name: str) -> None:
    golden = json.loads(RESULTS.read_text())[name]
    kind = gmi_wire.OUTPUT_KINDS[ENTRIES[name].task]

    found = gmi_results.find_media(golden["outcome"], kind)

    read = [[one.kind, one.url or f"base64:{one.data}", one.is_thumbnail] for one in found]
    assert read == golden["read"]


@pytest.mark.parametrize("name", MARKET)
def test_options_of_the_entry_rename_every_parameter(name: str) -> None:
    options = gmi_wire.read_options(SPECS[name])

    for parameter in contracts()[name].parameters:
        ours = parameter.name
        if parameter.type not in ("image", "images", "video", "audio") and ours != "scale":
            assert options.fields.get(ours, gmi_wire._FIELDS.get(ours, ours)) == parameter.sent_as
        assert (ours in options.strings) == (parameter.vendor_type == "string")
        assert options.values.get(ours, {}) == parameter.values


REFUSED: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    # model, input, code, parameter, part of the message
    "no portrait": (
        "GMI-MiniMeTalks-Workflow",
        {"text": "hello", "audio": SOUND},
        *("missing_required_parameter", "input.image", "a picture"),
    ),
    "no recording": (
        "minimax-audio-voice-clone-speech-2.6-hd",
        {"text": "hello"},
        *("missing_required_parameter", "input.recording", "a recording"),
    ),
    "no picture to blend": (
        "bria-fibo-image-blend",
        {"prompt": "x"},
        *("missing_required_parameter", "input.image", "image"),
    ),
    "two pictures to edit": (
        "bria-fibo-edit",
        {"prompt": "x", "images": [PICTURE, PICTURE]},
        *("invalid_value", "input.images", "at most 1"),
    ),
    "resolution": (
        "Minimax-Hailuo-2.3-Fast",
        {"prompt": "x", "resolution": "banana"},
        *(
            "invalid_value",
            "input.resolution",
            "'banana', but Minimax-Hailuo-2.3-Fast",
        ),
    ),
    "unknown resolution": (
        "Veo3",
        {"prompt": "x", "resolution": "banana"},
        *("unsupported_parameter", "input.resolution", "Veo3 accepts prompt, seconds"),
    ),
    "a day": (
        "pixverse-v5.6-t2v",
        {"prompt": "x", "seconds": 86400},
        *("invalid_value", "input.seconds", "accepts 5, 8, 10"),
    ),
    "fraction": (
        "Sora-2-Pro",
        {"prompt": "x", "seconds": 3.7},
        *("invalid_value", "input.seconds", "accepts 4, 8, 12"),
    ),
    "size": (
        "Sora-2-Pro",
        {"prompt": "x", "size": "123x77"},
        *("invalid_value", "input.size", "1792x1024"),
    ),
    "small": (
        "seedream-5.0-lite",
        {"prompt": "x", "size": "1024x1024"},
        *("invalid_value", "input.size", "3686400 to 10404496 pixels, such as 2048x2048"),
    ),
    "shape": (
        "Veo3",
        {"prompt": "x", "size": "64x64"},
        *("invalid_value", "input.size", "the aspect ratios 16:9, 9:16"),
    ),
    "aspect ratio": (
        "Veo3",
        {"prompt": "x", "parameters": {"aspect_ratio": "1:1"}},
        *("invalid_value", "input.parameters.aspect_ratio", "accepts 16:9, 9:16"),
    ),
    "misspelt": (
        "Veo3",
        {"prompt": "x", "parameters": {"durationSecond": "8"}},
        *("unknown_parameter", "input.parameters.durationSecond", "Did you mean durationSeconds?"),
    ),
    "field of another model": (
        "Veo3",
        {"prompt": "x", "fps": 30},
        *("unsupported_parameter", "input.fps", "Veo3 accepts prompt"),
    ),
    "combination": (
        "pixverse-v5.6-t2v",
        {"prompt": "x", "quality": "1080p", "seconds": 10},
        *("invalid_value", "input.seconds", "quality 1080p and seconds 10 together"),
    ),
    "range": (
        "Kling-Image2Video-V2-Master",
        {"image": PICTURE, "guidance": 7},
        *("invalid_value", "input.guidance", "at most 1"),
    ),
    "speed": (
        "minimax-tts-speech-2.6-turbo",
        {"text": "x", "speed": 4},
        *("invalid_value", "input.speed", "at most 2"),
    ),
    "type": (
        "seedream-5.0-lite",
        {"prompt": "x", "parameters": {"watermark": "banana"}},
        *("invalid_value", "input.parameters.watermark", "true or false"),
    ),
    "emotion": (
        "minimax-tts-speech-2.6-turbo",
        {"text": "x", "parameters": {"emotion": "bored"}},
        *("invalid_value", "input.parameters.emotion", "'bored'"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_vendor_refuses_is_refused_before_a_quote(case: str) -> None:
    model, given, code, param, part = REFUSED[case]

    error = refused(model, **given)

    assert (error.code, error.param) == (code, param)
    assert part in error.message


@pytest.mark.parametrize(
    ("model", "payload", "param", "part"),
    [
        ("Veo3", {"prompt": "x", "durationSeconds": "9"}, "durationSeconds", "accepts 4, 6, 8"),
        ("Veo3", {"prompt": "x", "aspectRatio": "1:1"}, "aspectRatio", "16:9"),
        ("Veo3", {"prompt": "x", "negativPrompt": "y"}, "negativPrompt", "mean negativePrompt?"),
        ("bria-fibo-edit", {"images": [PICTURE]}, "prompt", "a prompt"),
        ("GMI-MiniMeTalks-Workflow", {"text": "hi"}, "reference_images", "a picture"),
        (
            "minimax-audio-voice-clone-speech-2.6-turbo",
            {"text": "x", "source_audi": SOUND},
            "source_audio",
            "a recording of the voice",
        ),
        (
            "minimax-audio-voice-clone-speech-2.6-turbo",
            {"text": "x", "source_audio": SOUND, "need_volume_normalization": True},
            "need_volume_normalization",
            "Did you mean need_volumn_normalization?",
        ),
        (
            "minimax-audio-voice-clone-speech-2.6-turbo",
            {"text": "x", "recording": SOUND},
            "source_audio",
            "a recording of the voice",
        ),
        ("minimax-tts-speech-2.6-turbo", {"text": "x", "channel": "3"}, "channel", "accepts 1, 2"),
        ("minimax-tts-speech-2.6-turbo", {"text": "x", "channel": [1]}, "channel", "accepts 1, 2"),
    ],
)
def test_errors_of_the_queue_name_the_key_that_was_sent(
    model: str, payload: dict[str, Any], param: str, part: str
) -> None:
    error = refused_payload(model, **payload)

    assert error.param == param
    assert part in error.message


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("inworld-tts-1.5-mini", {"text": "x", "voice": "Nobody"}),
        ("bria-fibo-edit", {"prompt": "x", "image": PICTURE, "steps": 10}),
        ("bria-fibo-relight", {"prompt": "under water", "image": PICTURE}),
        ("bria-fibo-image-blend", {"prompt": "x", "images": [PICTURE, PICTURE]}),
        ("reve-create-20250915", {"prompt": "x", "parameters": {"version": "latest"}}),
        ("Minimax-Hailuo-2.3-Fast", {"prompt": "x"}),
        ("seedream-4-0-250828", {"prompt": "x", "size": "960x540"}),
        ("seedream-5.0-lite", {"prompt": "x", "parameters": {"watermark": True}}),
        ("elevenlabs-tts-v3", {"text": "x", "parameters": {"seed": "5", "stability": 0.5}}),
    ],
)
def test_a_guess_refuses_nothing(model: str, given: dict[str, Any]) -> None:
    assert prepared(model, **given).limits.requests == 1


def test_an_operator_can_disable_the_check() -> None:
    entry = ENTRIES["Veo3"].model_copy(update={"contract": False})

    assert prepare(entry, parse(entry.task, {"prompt": "x", "seconds": 9})).limits.video_ms == 9000


def test_mistakes_in_a_contract_are_reported_with_their_place(tmp_path: Path) -> None:
    text = (FILES / "Veo3.yaml").read_text()
    wrong = text.replace("type: integer", "type: integr").replace("is_complete", "is_whole")
    path = tmp_path / "Veo3.yaml"
    path.write_text(wrong)

    with pytest.raises(CatalogError) as caught:
        load_contract(path)

    lines = wrong.splitlines()
    places = {problem.path: lines[problem.line - 1].strip() for problem in caught.value.problems}
    assert places["parameters.1.type"] == "type: integr"
    assert places["is_whole"] == "is_whole: true"
    assert all(problem.file == str(path) for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("line", "replaced", "part"),
    [
        ("name: Veo3", "name: Veo4", "must be called Veo4.yaml"),
        ("    default: 8", "    default: 9", "not one of its options"),
        ("guesses: [options]", "guesses: [min]", "which 'personGeneration' does not have"),
        ("  - name: seconds", "  - name: prompt", "'prompt' is listed twice"),
        ('price: "0.40"', "price: 0.40", "not in quotes"),
    ],
)
def test_a_contract_is_consistent(tmp_path: Path, line: str, replaced: str, part: str) -> None:
    path = tmp_path / "Veo3.yaml"
    path.write_text((FILES / "Veo3.yaml").read_text().replace(line, replaced, 1))

    with pytest.raises(CatalogError, match=part):
        load_contract(path)


def test_the_queue_lists_the_vendors_parameters() -> None:
    view = model_view(ENTRIES["Veo3"], [], created_at=0, updated_at=0)

    parameters = {each["name"]: each for each in view["parameters"]}
    assert parameters["durationSeconds"] == {
        "name": "durationSeconds",
        "display_name": "seconds",
        "description": "",
        "type": "enum",
        "required": False,
        "default_value": 8,
        "options": [4, 6, 8],
        "min_value": None,
        "max_value": None,
        "guesses": [],
    }
    assert parameters["prompt"]["required"]
    assert parameters["personGeneration"]["guesses"] == ["options"]
    assert not view["accepts_other_parameters"]


@pytest.mark.parametrize("name", MARKET)
def test_the_catalog_shows_the_contract(name: str) -> None:
    shown = json.loads(json.dumps(entry_view(ENTRIES[name], [], find=ENTRIES.get)))["contract"]

    assert shown["strengths"]
    assert shown["expected_seconds"]["least"] <= shown["expected_seconds"]["most"]
    assert len(shown["parameters"]) == len(contracts()[name].parameters)
    assert entry_view(ENTRIES["pocket-image"], [], find=ENTRIES.get)["contract"] is None
    assert format_usd(contracts()[name].price)

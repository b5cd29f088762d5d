"""The operator's file of the gateway: what it makes, and what its errors say."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmserve.gateway.configuration import (
    ApplicationSection,
    ConfigurationError,
    GatewayConfiguration,
    LimitsSection,
    ModelSection,
    ScalingSection,
    UserSection,
    UserSharesSection,
    read,
)
from llmserve.generation import GenerationRequest
from llmserve.policies import FairServe, Fcfs, Load, RequestsPerMinute, VirtualTokenCounter

MODEL = '[models.llama]\njob = "serve"\ntokenizer = "simulated"\n'
FULL = (
    MODEL
    + """
[users.alice]
requests_per_minute = 2
[users.bob]
[shares]
weights = ["alice 3"]
others = 2
[limits]
requests_per_minute = 1
[applications.chat]
input_tokens = 512
output_tokens = 512
users = ["alice"]
"""
)


def written(tmp_path, text):
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return path


def test_the_policy_has_shares_applications_and_limits(tmp_path):
    configuration = read(written(tmp_path, FULL))
    assert configuration.shares.factors == {"alice": 1.5}
    policy = configuration.make_policy()
    assert isinstance(policy, FairServe)
    chat = GenerationRequest("r", "alice", [1], 1, "chat")
    assert policy.weight(chat) == 2.0
    assert policy.weight(GenerationRequest("r", "bob", [1], 1, "chat")) == 1.0
    busy = Load(queued=100, slots=1)
    refusals = [
        policy.admit(GenerationRequest(f"{user}{number}", user, [1], 1), busy, 0.0)
        for user in ("alice", "bob")
        for number in range(3)
    ]
    assert [refusal is None for refusal in refusals] == [True, True, False, True, False, False]
    assert {refusal.limit for refusal in refusals if refusal} == {"user_requests_per_minute"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fcfs", Fcfs),
        ("vtc", VirtualTokenCounter),
        ("rpm", RequestsPerMinute),
        ("fairserve", FairServe),
    ],
)
def test_each_policy(tmp_path, name, kind):
    limits = "[limits]\nrequests_per_minute = 5\n" if name in ("rpm", "fairserve") else ""
    text = f'policy = "{name}"\n' + limits + MODEL
    assert type(read(written(tmp_path, text)).make_policy()) is kind


def test_rpm_has_the_limits_of_single_users(tmp_path):
    text = 'policy = "rpm"\n' + MODEL + "[users.alice]\nrequests_per_minute = 2\n[users.bob]\n"
    policy = read(written(tmp_path, text + "[limits]\nrequests_per_minute = 1")).make_policy()
    refusals = [
        policy.admit(GenerationRequest(f"{user}{number}", user, [1], 1), Load(0, 1), 0.0)
        for user in ("alice", "bob")
        for number in range(3)
    ]
    assert [refusal is None for refusal in refusals] == [True, True, False, True, False, False]
    assert "limit of 2 requests per minute of user alice" in refusals[2].sentence


@pytest.mark.parametrize(
    ("policy", "text", "keys"),
    [
        ("rpm", "[shares]\nothers = 2\n", ["shares (for fairserve and vtc)"]),
        ("fcfs", '[shares]\nweights = ["alice 2"]\n', ["shares (for fairserve and vtc)"]),
        (
            "vtc",
            "[limits]\nrequests_per_minute = 1\noverload_ends_at = 0.5\n",
            [
                "limits.requests_per_minute (for fairserve and rpm)",
                "limits.overload_ends_at (for fairserve)",
            ],
        ),
        (
            "fcfs",
            "[users.bob]\nrequests_per_minute = 1\n",
            ["users.bob.requests_per_minute (for fairserve and rpm)"],
        ),
        (
            "rpm",
            "[limits]\nrequests_per_minute = 1\n[applications.chat]\ninput_tokens = 1\n"
            "output_tokens = 1\nrequests_per_minute = 1\n",
            ["applications.chat.requests_per_minute (for fairserve)"],
        ),
        ("vtc", "[shares]\nothers = 2\n[limits]\nopen_requests = 3\n", []),
    ],
)
def test_a_key_without_effect_is_refused(tmp_path, policy, text, keys):
    if policy == "rpm" and "[limits]" not in text:
        text += "[limits]\nrequests_per_minute = 1\n"
    path = written(tmp_path, f'policy = "{policy}"\n' + MODEL + "[users.alice]\n" + text)
    if not keys:
        read(path)
        return
    with pytest.raises(ConfigurationError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path}: with the policy {policy} these keys have no effect: {', '.join(keys)}; remove "
        "them, or set another policy."
    )


def test_paths_are_relative_to_the_file(tmp_path):
    configuration = read(written(tmp_path, MODEL))
    assert configuration.keys == tmp_path / "keys.json"
    assert configuration.database == f"sqlite:///{tmp_path}/gateway.db"
    assert configuration.address == ("127.0.0.1", 8300)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "models is missing; set it"),
        ("models = {}", "models: "),
        ("[models.llama]\n", "models.llama: set either job or engines"),
        (MODEL + 'engines = ["a:1"]', "models.llama: set either job or engines"),
        ('[models.llama]\njob = "serve"', "models.llama: set tokenizer, the folder of the model's"),
        (MODEL + "[users.alice]\nshre = 1", "there is no key users.alice.shre; correct or remove"),
        ('listen = "8300"\n' + MODEL, "listen: write an address and a port, .*it is '8300'"),
        ('url = "llm.example.org"\n' + MODEL, "url: write an address such as .*, or leave it out"),
        ('url = "javascript:alert(1)"\n' + MODEL, "url: write an address such as "),
        ('policy = "lifo"\n' + MODEL, "policy: Input should be 'fairserve', "),
        ('policy = "rpm"\n' + MODEL, "the policy rpm needs limits.requests_per_minute; set it"),
        (MODEL + '[shares]\nweights = ["alice"]', 'shares.weights: "alice" is not a weight; write'),
        (MODEL + '[shares]\nweights = ["eve 2"]', 'shares.weights names "eve", who is not a user'),
        (MODEL + '[users."a b"]', 'users: "a b" is not a name; use up to 64 letters'),
        (
            MODEL + "[applications.chat]\ninput_tokens = 0\noutput_tokens = 0",
            "applications.chat: input_tokens and output_tokens are both 0",
        ),
        (
            MODEL + "[applications.chat]\ninput_tokens = 1\noutput_tokens = 1\nfloor = 2",
            "applications.chat.floor: Input should be less than or equal to 1 .it is 2",
        ),
        (
            MODEL + "[limits]\noverload_ends_at = 3\noverload_begins_at = 2",
            "limits: overload_ends_at is above overload_begins_at",
        ),
        ("[", "is no TOML: "),
    ],
)
def test_an_error_names_the_key(tmp_path, text, sentence):
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        read(written(tmp_path, text))
    assert str(tmp_path / "gateway.toml") in str(caught.value)


def test_all_errors_are_reported_at_once(tmp_path):
    text = "comment_interval_s = 0\nmax_body_bytes = 1\n" + MODEL
    with pytest.raises(ConfigurationError) as caught:
        read(written(tmp_path, text))
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"There is no file .*gateway.toml; name the gateway"
    ):
        read(tmp_path / "gateway.toml")


def test_the_page_has_a_correct_file_and_names_every_key(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "llm-gateway.md").read_text()
    example = page.split("<!-- gateway.toml -->")[1].split("```toml\n")[1].split("```")[0]
    configuration = read(written(tmp_path, example))
    assert configuration.shares.factors == {"alice": 2.0}
    sections = (
        GatewayConfiguration,
        ModelSection,
        ApplicationSection,
        UserSection,
        UserSharesSection,
        LimitsSection,
        ScalingSection,
    )
    keys = {key for section in sections for key in section.model_fields}
    missing = {key for key in keys if key not in page}
    assert not missing

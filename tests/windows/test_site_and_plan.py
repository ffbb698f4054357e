"""Site and plan files: what is accepted, and that every refusal names field, value and expectation."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from windows_examples import changed, first_hold_document, plan_document, service, site_document

from windows.design import require_design
from windows.errors import DocumentError
from windows.plan import PrimaryMetric, Purpose, StepKind, parse_plan
from windows.site import Service, parse_site


def refusal(document: dict[str, Any], kind: str) -> str:
    with pytest.raises(DocumentError) as caught:
        (parse_site if kind == "site" else parse_plan)(document)
    return str(caught.value)


def test_examples_are_accepted_and_survive_a_round_trip() -> None:
    site = parse_site(site_document())
    plan = parse_plan(plan_document())
    assert parse_site(site.to_document()) == site
    assert parse_plan(plan.to_document()) == plan
    assert parse_plan(first_hold_document()).purpose is Purpose.FIRST_HOLD
    assert plan.bound_s == 5400
    assert plan.provisional_s == 60
    assert plan.arm_order(2) == ("B2", "A2")


def test_models_are_frozen() -> None:
    site = parse_site(site_document())
    with pytest.raises(ValueError, match="frozen"):
        site.name = "other"  # type: ignore[misc]


SITE_FAULTS = {
    "unknown field": ("hosts.0.prot", 22, "hosts[0].prot: unknown field", "did you mean 'port'"),
    "string for a number": ("hosts.0.port", "22", "hosts[0].port: found '22'", "an integer"),
    "bool for a number": ("hosts.0.port", True, "hosts[0].port: found True", "an integer"),
    "float": ("hosts.0.port", 22.0, "hosts[0].port: found the float 22.0", "an integer"),
    "port out of range": ("hosts.0.port", 0, "hosts[0].port: found 0", "greater than or equal to 1"),
    "missing": ("hosts.0.python", ..., "hosts[0].python: found nothing", "required"),
    "wrong schema": ("schema", "coordinator/site/v2", "schema: found 'coordinator/site/v2'", "coordinator/site/v1"),
    "relative path": ("hosts.0.state_dir", "state", "hosts[0].state_dir: found 'state'", "absolute path"),
    "ssh without key": (
        "hosts.0.host_key",
        ...,
        "hosts[0].transport, hosts[0].host_key: found 'ssh'",
        "'host_key' for transport 'ssh'",
    ),
    "local with address": ("hosts.1.address", "10.0.0.2", "hosts[1]", "no 'address' for transport 'local'"),
    "gpu by index": ("hosts.0.devices", ["0"], "hosts[0].devices[0]: found '0'", "UUID"),
    "no hosts": ("hosts", [], "hosts: found a list of 0", "at least 1"),
    "host twice": ("hosts.1.name", "spark-a", "(whole file)", "distinct host names, found 'spark-a' twice"),
    "unit for a process": ("hosts.0.services.0.unit", "a.service", "hosts[0].services[0]", "no field 'unit'"),
    "no probe": ("hosts.0.services.0.probe", ..., "hosts[0].services[0]", "a probe"),
    "password in a url": ("hosts.0.services.0.probe.url", "http://u:p@h/", "services[0].probe.url", "no user name"),
    "drain longer than stop": ("hosts.0.services.0.drain_s", 100, "services[0].drain_s: found", "stop_s >= drain_s"),
    "key of another type": ("hosts.0.host_key.type", "ssh-rsa", "hosts[0].host_key", "a key body of type ssh-rsa"),
    "relative start": ("hosts.0.services.0.start", ["python3"], "hosts[0].services[0]", "absolute path"),
    "empty hook": ("before_stop", [[]], "before_stop", "at least one word"),
    "pin that is no digest": ("policy_pins", {"live": "abc"}, "policy_pins.live: found 'abc'", "64 lower-case hex"),
}


@pytest.mark.parametrize("name", SITE_FAULTS)
def test_site_refusals_name_field_value_and_expectation(name: str) -> None:
    path, value, *wanted = SITE_FAULTS[name]
    text = refusal(changed(site_document(), path, value), "site")
    for part in wanted:
        assert part in text


PLAN_FAULTS = {
    "gap in the holds": ("holds", {"1": ["A1", "B1"], "3": ["B2", "A2"]}, "holds", "without a gap"),
    "half a pair": ("holds", {"1": ["A1"], "2": ["B1"]}, "holds", "whole pairs"),
    "two of one arm": ("holds", {"1": ["A1", "A2"], "2": ["B2", "B1"]}, "holds", "beside its partner"),
    "unbalanced": ("holds", {"1": ["A1", "B1"], "2": ["A2", "B2"]}, "holds", "A first as often as B first"),
    "pair twice": ("holds", {"1": ["A1", "B1"], "2": ["B1", "A1"]}, "holds", "each once"),
    "no arm order in a campaign": ("holds", {"1": []}, "purpose, holds: found", "arms in the holds of a campaign"),
    "A sampled": ("arms.A.mode", "sampled-top32-v2", "arms", "A is the untouched path"),
    "unknown mode": ("arms.B.mode", "on", "arms.B.mode: found 'on'", "'sampled-top32-v2'"),
    "settings differ": ("arms.B.settings", {}, "arms", "the same setting names"),
    "setting shadows": ("arms.A.settings", {"mode": "x"}, "arms.A.settings", "is a placeholder already"),
    "unknown placeholder": ("pair_qualify.argv", ["{pyton}"], "(whole file)", "found {pyton}"),
    "missing bound": ("step_bounds_s.boot", ..., "step_bounds_s.boot: found None", "step_bounds_s for boot"),
    "bound for restore": ("step_bounds_s.restore", 5, "step_bounds_s", "restore_reserve_s covers it"),
    "unknown step": ("step_bounds_s.boots", 5, "step_bounds_s.boots", "'boot'"),
    "zero bound": ("step_bounds_s.boot", 0, "step_bounds_s.boot: found 0", "greater than or equal to 1"),
    "reserve eats the bound": (
        "restore_reserve_s",
        5400,
        "restore_reserve_s, bound_s: found 5400",
        "below bound_s (5400)",
    ),
    "orphaned while leasing": ("orphan_after_s", 19, "orphan_after_s, step_bounds_s.lease: found 19, 20", "at least"),
    "expired while leasing": (
        "step_bounds_s.lease",
        61,
        "provisional_s, step_bounds_s.lease: found None, 61",
        "at least",
    ),
    "manifest outside": ("load.manifest", "../x", "load.manifest: found '../x'", "relative path"),
    "margin of zero": ("comparison.margin_ppm", 0, "comparison.margin_ppm: found 0", "greater than or equal to 1"),
    "floor without source": (
        "comparison.aa_floor_ppm",
        5,
        "comparison.aa_floor_ppm, comparison.aa_floor_receipt: found 5",
        "a floor without a source",
    ),
    "no comparison": ("comparison", ..., "purpose, comparison: found", "a 'comparison' in a campaign plan"),
    "seed too large": ("load.seeds", [1 << 53], "load.seeds[0]", "less than or equal to 9007199254740991"),
    "temperature as number": ("load.temperature", 1, "load.temperature: found 1", "a string"),
}


@pytest.mark.parametrize("name", PLAN_FAULTS)
def test_plan_refusals_name_field_value_and_expectation(name: str) -> None:
    path, value, *wanted = PLAN_FAULTS[name]
    text = refusal(changed(plan_document(), path, value), "plan")
    for part in wanted:
        assert part in text


def test_a_failing_part_is_reported_once() -> None:
    text = refusal(changed(site_document(), "hosts.0.port", "22"), "site")
    assert len(text.splitlines()) == 2


def test_a_first_hold_has_no_arms() -> None:
    text = refusal({**first_hold_document(), "comparison": plan_document()["comparison"]}, "plan")
    assert "no 'comparison' in a first-hold plan" in text


def measurement_document() -> dict[str, Any]:
    program = {"name": "worker", "role": "drafter", "argv": ["{python}", "-m", "measure"], "timeout_s": 60}
    bounds = {**first_hold_document()["step_bounds_s"], "measure": 90}
    return {**first_hold_document(), "purpose": "measurement", "measurements": [program], "step_bounds_s": bounds}


def test_a_measurement_plan_runs_its_programs_and_nothing_else() -> None:
    plan = parse_plan(measurement_document())
    assert plan.step_kinds()[-1] is StepKind.MEASURE
    program = measurement_document()["measurements"][0]
    cases = {
        "distinct names": {"measurements": [program, program]},
        "at most the bound of 'measure'": {"measurements": [{**program, "timeout_s": 91}]},
        "measurements in a measurement plan": {"measurements": []},
        "step_bounds_s for measure": {"step_bounds_s": first_hold_document()["step_bounds_s"]},
        "no 'comparison'": {"comparison": plan_document()["comparison"]},
        "{nobody}": {"measurements": [{**program, "argv": ["{nobody}"]}]},
    }
    for wanted, change in cases.items():
        assert wanted in refusal({**measurement_document(), **change}, "plan"), wanted
    assert "in no other" in refusal({**measurement_document(), "purpose": "first-hold"}, "plan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("env", {"HF_TOKEN": "planted-5f1c"}),
        ("env", {"MY_API_KEY": "planted-5f1c"}),
        ("env", {"DB_PASSWORD": "planted-5f1c"}),
        ("env", {"PORT": ["planted-5f1c"]}),
        ("start", ["/bin/serve", "--api-key=planted-5f1c"]),
        ("start", ["/bin/serve", "--hf-access-token", "planted-5f1c"]),
        ("secret_env", {"X": ["planted-5f1c"]}),
        ("passwrd", "planted-5f1c"),
        ("probe", "planted-5f1c"),
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_and_never_quoted(field: str, value: Any) -> None:
    document = changed(site_document(), "hosts.0.services", [service(**{field: value})])
    text = refusal(document, "site")
    if field != "probe":
        assert "planted-5f1c" not in text
    assert field in text


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "MAX_NUM_BATCHED_TOKENS", "OMP_NUM_THREADS", "PATH"])
def test_settings_that_only_sound_like_secrets_are_accepted(name: str) -> None:
    parse_site(changed(site_document(), "hosts.0.services", [service(env={name: "1"})]))


def test_options_that_only_sound_like_secrets_are_accepted() -> None:
    start = ["/bin/serve", "--max-tokens", "5", "--tokenizer", "t", "--token-budget=9"]
    parse_site(changed(site_document(), "hosts.0.services", [service(start=start)]))


def test_to_guard_is_complete_and_plain() -> None:
    guard = Service.model_validate_json(
        '{"name": "t", "kind": "docker", "container": "c", "expected": "stopped"}'
    ).to_guard()
    assert guard == {
        "name": "t",
        "kind": "docker",
        "unit": None,
        "container": "c",
        "start": [],
        "cwd": None,
        "env": {},
        "secret_env": {},
        "log": None,
        "stop_signal": "TERM",
        "drain_s": 30,
        "stop_s": 60,
        "start_s": 600,
        "ports": [],
        "watch_s": 5,
        "expected": "stopped",
        "supervisors": [],
        "stop_order": 0,
        "probe": None,
    }
    assert type(guard["kind"]) is str


def test_a_toml_file_parses_and_a_toml_date_is_refused() -> None:
    text = 'schema = "coordinator/site/v1"\nname = 2026-01-01\n'
    assert "name: found a date" in refusal(tomllib.loads(text), "site")


def test_describing_never_prints_terminal_escapes() -> None:
    text = refusal(changed(site_document(), "name", "\x1b[2Jlab\u202e"), "site")
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_nesting_without_end_is_refused() -> None:
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    assert "nesting deeper" in refusal(changed(site_document(), "notify", deep), "site")


@pytest.mark.parametrize(
    "orders",
    [
        [("A1", "B1"), ("B2", "A2")],
        [("B1", "A1"), ("A2", "B2")],
        [("A1", "B1", "B2", "A2")],
        [("A1", "B1"), ("B2", "A2"), ("A3", "B3")],
        [("A1", "B1")],
        [("A1", "B1", "B2", "A2"), ("B3", "A3", "A4", "B4")],
    ],
)
def test_balanced_designs_are_accepted(orders: list[tuple[str, ...]]) -> None:
    require_design(orders)


def test_every_step_kind_of_a_campaign_has_a_place() -> None:
    plan = parse_plan(plan_document())
    assert set(plan.step_kinds()) | {StepKind.RESTORE, StepKind.CLOSE, StepKind.MEASURE} == set(StepKind)
    assert [m for m in PrimaryMetric if not m.is_higher_better] == [
        PrimaryMetric.FIRST_TOKEN_P50,
        PrimaryMetric.INTER_TOKEN_P50,
    ]

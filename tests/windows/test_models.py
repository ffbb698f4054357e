"""Models of a plan: a digest of what they are, lists that are refused, the placeholder a command names them by."""

from __future__ import annotations

from typing import Any

import pytest
from windows_examples import changed, first_hold_document, plan_document, site_document

from windows.compiled import compile_plan
from windows.errors import DocumentError, PlanError
from windows.models import Model
from windows.plan import parse_plan
from windows.site import parse_site

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def model(*paths: str, **changes: Any) -> dict[str, Any]:
    files = [{"path": path, "sha256": EMPTY, "size_bytes": 0} for path in paths or ("config.json",)]
    return {"name": "draft", "role": "drafter", "source": "models/draft", "files": files, **changes}


def parsed(*paths: str) -> Model:
    return parse_plan({**plan_document(), "models": [model(*paths)]}).models[0]


def test_a_models_digest_is_of_its_files_in_any_order() -> None:
    """Red when the same files get two folders, or another file the same one."""
    assert parsed("a", "b/c").sha256 == parsed("b/c", "a").sha256
    assert parsed("a", "b/c").sha256 != parsed("a", "b/d").sha256
    assert parsed("a").folder("/srv/work") == f"/srv/work/models/{parsed('a').sha256[:32]}"


@pytest.mark.parametrize(
    "models",
    [
        [model("../up")],
        [model("/etc/passwd")],
        [model("a", "a")],
        [model("a", "a/b")],
        [model(files=[])],
        [model(name="Draft")],
        [model(), model()],
        [model(role="nobody")],
    ],
    ids=["up", "absolute", "twice", "file-and-folder", "empty", "name", "same-name", "role"],
)
def test_lists_that_are_no_model_are_refused(models: list[dict[str, Any]]) -> None:
    """Red when a path leaves the model's folder, or two files would share one name on a host."""
    with pytest.raises(DocumentError):
        parse_plan({**plan_document(), "models": models})


def test_a_command_names_a_model_of_the_plan_and_no_other() -> None:
    """Red when a word that nothing fills reaches a host."""
    argv = ["{python}", "-m", "remote_dspark.serve", "--checkpoint", "{model_draft}"]
    with_word = changed(plan_document(), "services.0.argv", argv)
    assert parse_plan({**with_word, "models": [model()]}).model_placeholders() == ("model_draft",)
    with pytest.raises(DocumentError, match="model_draft"):
        parse_plan(with_word)


def test_a_plan_whose_models_nobody_reads_is_refused() -> None:
    """Red when a first hold waits for uploads, a setting hides a model, or a model belongs on no host."""
    with pytest.raises(DocumentError, match="first-hold"):
        parse_plan({**first_hold_document(), "models": [model()]})
    document = changed(plan_document(), "arms.A.settings", {"model_draft": "x"})
    document = changed(document, "arms.B.settings", {"model_draft": "y"})
    document = changed(document, "services.1.argv", ["{python}", "{model_draft}"])
    with pytest.raises(DocumentError, match="model_draft"):
        parse_plan({**document, "models": [model()]})
    plan = parse_plan({**plan_document(), "models": [model()]})
    site = site_document()
    site["hosts"][1]["roles"] = ["target"]
    with pytest.raises(PlanError, match="drafter"):
        compile_plan(parse_site(site), plan, {"coordinator": EMPTY})


def test_a_models_files_are_part_of_the_plans_digest() -> None:
    """Red when two plans with different models have one digest."""
    site = parse_site(site_document())
    plans = [parse_plan({**plan_document(), "models": [model(path)]}) for path in ("a", "b")]
    assert len({compile_plan(site, plan, {"coordinator": EMPTY}).sha256 for plan in plans}) == 2

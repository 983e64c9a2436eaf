"""Answers: the good ones make a service, the bad ones are refused before anything is written."""

import json
import keyword
import re
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
from cookiecutter.exceptions import FailedHookException

import local_extensions
from local_extensions import CHECKS, IMPORTED, LIBRARIES, LONGEST_LINE, LONGEST_NAME, mistakes

from tests.baked import DEFAULTS, EXAMPLES, RAW, ROOT, Template, features
from tests.imports import imported

TEXTS = ["service_name", "package_name", "description", "author"]
QUESTIONS = [*TEXTS, "worked_example", *features(), "engine"]

CANARY = "canary"
"""A file that code in an answer would leave behind, wherever it is run."""

TOUCH = f'__import__("pathlib").Path("{CANARY}").touch()'

HOSTILE = [
    pytest.param("", id="nothing"),
    pytest.param(" ", id="a space"),
    pytest.param('say "hello"', id="double quotes"),
    pytest.param('"""', id="triple quotes"),
    pytest.param("'''", id="triple single quotes"),
    pytest.param("back\\slash", id="a backslash"),
    pytest.param("ends with \\", id="a backslash at the end"),
    pytest.param("two\nlines", id="a line break"),
    pytest.param("two\rlines", id="a carriage return"),
    pytest.param("two\u2028lines", id="a line separator"),
    pytest.param("tab\there", id="a tab"),
    pytest.param("bell\a", id="a control character"),
    pytest.param("\u202eleft to right", id="a change of direction"),
    pytest.param("zero\u200bwidth", id="an invisible character"),
    pytest.param("lone\ud800surrogate", id="half a character"),
    pytest.param(f"$(touch {CANARY})", id="a shell substitution"),
    pytest.param(f"`touch {CANARY}`", id="backticks"),
    pytest.param(f"x; touch {CANARY} #", id="a shell command"),
    pytest.param(f"$(shell touch {CANARY})", id="a make function"),
    pytest.param("{{ 7 * 7 }}", id="another template language"),
    pytest.param("${HOME}", id="a variable"),
    pytest.param("100 %", id="an interpolation"),
    pytest.param("../elsewhere", id="another folder"),
    pytest.param("/elsewhere", id="the root folder"),
    pytest.param(f'"); {TOUCH} #', id="Python behind a quote"),
    pytest.param(f"'); {TOUCH} #", id="Python behind a single quote"),
    pytest.param(f'""")\n{TOUCH}\n("""', id="Python behind triple quotes"),
    pytest.param(f"\\'); {TOUCH} #", id="Python behind an escaped quote"),
    pytest.param(f"\\u0027); {TOUCH} #", id="Python behind a quote's number"),
    pytest.param('x"\nscripts = { x = "y" }\n#', id="TOML behind a quote"),
    pytest.param("<b>bold</b>", id="HTML"),
    pytest.param("- a list\n- in YAML", id="YAML"),
    pytest.param("x" * (LONGEST_LINE + 1), id="too much"),
    pytest.param("広" * (LONGEST_LINE // 2 + 1), id="too much of what is wide"),
]

TEMPLATES = [
    pytest.param("<<7 * 7>>", id="an expression"),
    pytest.param("<<1 / 0>>", id="an error"),
    pytest.param("<<nothing.there>>", id="an unknown name"),
    pytest.param("<<", id="a beginning"),
    pytest.param(">>", id="an end"),
    pytest.param('# <% include "cookiecutter.json" %>', id="a block"),
    pytest.param("gone # <# a comment #>", id="a comment"),
    pytest.param(
        f'<<cycler.__init__.__globals__.os.system("touch {CANARY}")>>', id="a shell command"
    ),
    pytest.param(f"# <% set x = cycler.__init__.__globals__.{TOUCH} %>", id="Python in a block"),
    pytest.param(
        f'<<cookiecutter.service_name.replace("-", "_")>><<{TOUCH}>>', id="behind one of ours"
    ),
]


ACCEPTED = [
    pytest.param({"service_name": "a", "package_name": "b"}, id="one letter"),
    pytest.param({"service_name": "x" * LONGEST_NAME}, id="the longest name"),
    pytest.param({"service_name": "a1-b2-3c"}, id="digits and hyphens"),
    pytest.param({"package_name": "x_1__y_"}, id="underscores"),
    pytest.param(
        {"description": "Ça va: what's late (or lost)? 50/50 & more, e.g. A+B @ C_D - oui!"}
    ),
    pytest.param({"description": "荷物を追跡します"}, id="another script"),
    pytest.param({"description": "x" * LONGEST_LINE}, id="the longest description"),
    pytest.param({"author": "Ada"}, id="a name"),
    pytest.param({"author": "Ada O'Brien <ada@example.org>"}, id="an apostrophe"),
    pytest.param({"author": "King, Jr., M.-L. <m.l+k_1@mail.example.co>"}, id="a comma"),
    pytest.param({"author": "Łukasz Ñuñez–Ó’Dálaigh & Söhne (Team 7)"}, id="letters of Europe"),
    pytest.param({"author": "अदिति <a@b.c>"}, id="letters with marks"),
]


def sparsely(cases: list[Any], *kept: str) -> list[Any]:
    """Leave the cases with other ids to `make test-full`: each starts cookiecutter."""
    return [
        one
        if one.id in kept
        else pytest.param(*one.values, id=one.id, marks=[*one.marks, pytest.mark.full])
        for one in cases
    ]


NO_AUTHOR = [
    "Ada <ada>",
    "Ada <ada@example.org> and others",
    "Ada <a@b.c> <a@b.c>",
    "Ada<ada@example.org>",
    "<ada@example.org>",
    "Ada < ada@example.org >",
    "Ada <ada..x@example.org>",
    "Ada <.ada@example.org>",
    "Ada <ada@-.>",
    "Ada <ádá@example.org>",
    "Ada <ada@example.org",
    "Ada > Bob",
]


HIDING = [
    *("match", "type", "list", "asyncio", "test", "json", "typing", "site", "grpc_tools"),
    *("onceward", "attr"),
    *(
        "tests",
        "migrations",
        "dev",
        "deploy",
        "src",
        "stack",
        "send",
        "servers",
        "programs",
        "settings_guide",
        "build",
        "demo",
        "dist",
    ),
    *("aiokafka", "sqlalchemy", "asyncpg", "pytest", "opentelemetry", "pydantic_settings"),
    # Optional ones, which no service has.
    *("httpx", "email_validator", "python_multipart", "numpy", "trio", "yaml", "psycopg2"),
]


def questions_of(mistaken: list[str]) -> list[str]:
    return [line.partition(" ")[0] for line in mistaken]


def assert_refused(
    done: subprocess.CompletedProcess[str], output: Path, template: Template, *said: str
) -> None:
    """Cookiecutter failed, in words, wrote nothing and ran nothing."""
    assert done.returncode != 0
    assert "Nothing was generated." in done.stdout
    assert "Traceback" not in done.stdout
    for words in said:
        assert words in done.stdout
    assert list(output.rglob("*")) == []
    assert list((template.home / "tmp").glob("*/")) == []
    assert [*output.parent.rglob(CANARY), *template.home.rglob(CANARY)] == []


@pytest.mark.parametrize("answers", ACCEPTED)
def test_plain_answers_are_accepted(answers: dict[str, str]) -> None:
    assert mistakes({**DEFAULTS, **answers}) == []


@pytest.mark.parametrize("answer", HOSTILE)
def test_no_question_takes_a_hostile_answer(answer: str) -> None:
    found = mistakes(dict.fromkeys(QUESTIONS, answer))

    assert questions_of(found) == QUESTIONS
    assert all(line.isprintable() for line in found)


@pytest.mark.parametrize("answer", [None, True, 7, ["x"], {"x": "y"}], ids=repr)
def test_no_question_takes_what_is_not_text(answer: object) -> None:
    assert questions_of(mistakes(dict.fromkeys(QUESTIONS, answer))) == QUESTIONS


@pytest.mark.parametrize(
    "name", ["Parcel", "parcel_tracker", "7up", "-x", "x-", "x--y", "é", "x.y"]
)
def test_a_service_is_named_in_lower_case_letters_digits_and_hyphens(name: str) -> None:
    assert questions_of(mistakes({**DEFAULTS, "service_name": name})) == ["service_name"]


@pytest.mark.parametrize("name", ["Parcel", "parcel-tracker", "7up", "_x", "é", "x.y", "x y", "ﬁ"])
def test_a_package_is_named_in_lower_case_letters_digits_and_underscores(name: str) -> None:
    assert questions_of(mistakes({**DEFAULTS, "package_name": name})) == ["package_name"]


@pytest.mark.parametrize("author", NO_AUTHOR)
def test_an_author_is_a_name_with_a_mail_address_or_without(author: str) -> None:
    assert questions_of(mistakes({**DEFAULTS, "author": author})) == ["author"]


@pytest.mark.parametrize("name", [*HIDING, *filter(str.islower, keyword.kwlist)])
def test_a_package_does_not_hide_another(name: str) -> None:
    assert questions_of(mistakes({**DEFAULTS, "package_name": name})) == ["package_name"]


@pytest.mark.full
def test_no_library_imports_a_package_of_the_user_in_place_of_another() -> None:
    """If it fails, `make requirements` has not been run."""
    found = imported()

    accepted = {n for n in found if not mistakes({**DEFAULTS, "package_name": n})}

    assert accepted == set()
    assert IMPORTED - found == set(), "they are not imported any more"


@pytest.mark.parametrize("folder", [".", "dev", "src", "tests"])
def test_a_package_does_not_hide_anything_of_the_service(folder: str) -> None:
    names = {each.stem if each.suffix == ".py" else each.name for each in (RAW / folder).iterdir()}
    possible = {name for name in names if re.fullmatch("[a-z][a-z0-9_]*", name)}

    accepted = {n for n in possible if not mistakes({**DEFAULTS, "package_name": n})}

    assert possible
    assert accepted == set()


@pytest.mark.parametrize("name", ["dev/novel.py", "tests/novel/__init__.py", "src/novel/a.py"])
def test_what_is_added_to_the_service_tomorrow_is_not_hidden_either(
    name: str, tmp_path: Path, output: Path
) -> None:
    template = Template.copied_to(tmp_path)
    added = template.path / RAW.name / name
    added.parent.mkdir(exist_ok=True)
    added.touch()

    done = template.cookiecutter(output, "--no-input", "service_name=novel")

    assert_refused(done, output, template, "package_name must not be", "'novel'")


@pytest.mark.parametrize("name", ["a:b", "50 %", "$HOME", "\\t", '"x"', "`x`"])
def test_a_folder_in_which_no_service_runs_is_refused(
    name: str, template: Template, output: Path
) -> None:
    done = template.cookiecutter(output / name, "--no-input")

    assert done.returncode != 0
    assert "a service can't run in " in done.stdout
    assert "generate it in another folder" in done.stdout
    assert list((output / name).iterdir()) == []


def test_a_service_is_not_named_as_a_library_that_it_would_replace() -> None:
    accepted = {n for n in LIBRARIES if not mistakes({**DEFAULTS, "service_name": n})}

    assert accepted == set()


@pytest.mark.parametrize(
    "answer",
    sparsely(
        [each for each in HOSTILE if each.id != "half a character"],
        *(
            "nothing",
            "a shell command",
            "another folder",
            "Python behind a quote",
        ),
        *("a line break", "too much"),
    ),
)
def test_hostile_answers_on_the_command_line_are_all_refused_at_once(
    answer: str, template: Template, output: Path
) -> None:
    given = [f"{question}={answer}" for question in QUESTIONS]

    done = template.cookiecutter(output, "--no-input", *given)

    assert_refused(done, output, template, *QUESTIONS)


@pytest.mark.parametrize(
    "answer", sparsely(TEMPLATES, "an expression", "a shell command", "behind one of ours")
)
@pytest.mark.parametrize("question", ["service_name", "author"])
def test_an_answer_is_never_run_as_a_template(
    question: str, answer: str, template: Template, output: Path
) -> None:
    done = template.cookiecutter(output, "--no-input", f"{question}={answer}")

    assert_refused(done, output, template)


def test_a_template_in_the_users_configuration_is_not_run(template: Template, output: Path) -> None:
    configuration = output.parent / "config.yaml"
    configuration.write_text(json.dumps({"default_context": {"author": f"<<{TOUCH}>>"}}), "utf-8")

    done = template.cookiecutter(output, "--no-input", "--config-file", str(configuration))

    assert_refused(done, output, template)


@pytest.mark.parametrize("answer", ["maybe", "", "y", "Yes", "NO", "yes no", "1"])
@pytest.mark.parametrize("feature", features())
def test_a_feature_is_chosen_by_yes_or_no(feature: str, answer: str) -> None:
    assert mistakes({**DEFAULTS, feature: "yes"}) == mistakes({**DEFAULTS, feature: "no"}) == []
    assert mistakes({**DEFAULTS, feature: answer}) == [
        f"{feature} must be yes or no; it is {answer!r}."
    ]


@pytest.mark.parametrize("answer", ["maybe", "", "Parcels", "payment", "y", "none "])
def test_a_worked_example_is_chosen_by_its_name(answer: str) -> None:
    # Those of services of 1.0 are accepted, too: see below.
    for accepted in (*EXAMPLES, "yes", "no"):
        assert mistakes({**DEFAULTS, "worked_example": accepted}) == []
    assert mistakes({**DEFAULTS, "worked_example": answer}) == [
        f"worked_example must be parcels, payments or none; it is {answer!r}."
    ]


@pytest.mark.parametrize("answer", ["maybe", "", "yes", "Source", "packages", "package "])
def test_where_the_engine_comes_from_is_chosen_by_its_name(answer: str) -> None:
    for accepted in ("source", "package"):
        assert mistakes({**DEFAULTS, "engine": accepted}) == []
    assert mistakes({**DEFAULTS, "engine": answer}) == [
        f"engine must be source or package; it is {answer!r}."
    ]


def test_the_tests_of_an_engine_that_is_a_package_are_refused(
    template: Template, output: Path
) -> None:
    done = template.cookiecutter(output, "--no-input", "engine=package", "engine_tests=yes")

    said = "engine_tests must be no if engine is package, whose source is elsewhere."
    assert_refused(done, output, template, said)


@pytest.mark.parametrize(("old", "new"), [("yes", "parcels"), ("no", "none")])
def test_an_old_answer_about_the_worked_example_makes_the_same_service(
    template: Template, output: Path, old: str, new: str
) -> None:
    answers = {**DEFAULTS, "outside_calls": "yes", "http_api": "yes"}
    before = template.bake(output / "old", **{**answers, "worked_example": old})
    after = template.bake(output / "new", **{**answers, "worked_example": new})

    assert before.files() == after.files()
    record = json.loads(before.read(".cookiecutter.json"))
    assert record["cookiecutter"]["worked_example"] == new


@pytest.mark.parametrize(
    "feature", sparsely([pytest.param(one, id=one) for one in features()], "outside_calls")
)
def test_a_feature_that_is_neither_chosen_nor_left_out_is_refused(
    feature: str, template: Template, output: Path
) -> None:
    done = template.cookiecutter(output, "--no-input", f"{feature}=maybe")

    assert_refused(done, output, template, f"{feature} must be yes or no; it is 'maybe'.")


def test_features_of_the_users_configuration_are_refused_in_the_same_words(
    template: Template, output: Path
) -> None:
    configuration = output.parent / "config.yaml"
    chosen = dict.fromkeys(features(), "maybe")
    configuration.write_text(json.dumps({"default_context": chosen}), "utf-8")

    done = template.cookiecutter(output, "--no-input", "--config-file", str(configuration))

    refused = [f"{feature} must be yes or no; it is 'maybe'." for feature in chosen]
    assert_refused(done, output, template, *refused)


def test_an_answer_that_yaml_makes_a_boolean_is_refused_with_advice(
    template: Template, output: Path
) -> None:
    configuration = output.parent / "config.yaml"
    configuration.write_text("default_context:\n    object_store: no\n", "utf-8")

    done = template.cookiecutter(output, "--no-input", "--config-file", str(configuration))

    assert_refused(
        done, output, template, "object_store must be text, in quotes in YAML; it is False."
    )


def test_every_question_is_asked_in_words_and_accepts_its_default(
    template: Template, output: Path
) -> None:
    prompts = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["__prompts__"]

    done = template.cookiecutter(output, typed="\n" * len(QUESTIONS))

    assert done.returncode == 0, done.stdout
    said = " ".join(done.stdout.split())
    for question in QUESTIONS:
        assert f"{' '.join(prompts[question].split())} ({DEFAULTS[question]}):" in said
    assert list(output.iterdir()) == [output / "parcel-tracker"]


def test_a_feature_is_declined_by_typing_no(template: Template, output: Path) -> None:
    typed = ["" for _ in [*TEXTS, "worked_example"]] + ["no" for _ in features()] + [""]

    done = template.cookiecutter(output, typed="".join(f"{line}\n" for line in typed))

    assert done.returncode == 0, done.stdout
    assert not (output / "parcel-tracker" / "src" / "onceward" / "page").exists()


def test_a_feature_that_is_typed_wrongly_is_refused(template: Template, output: Path) -> None:
    typed = ["" for _ in [*TEXTS, "worked_example"]] + ["perhaps" for _ in features()] + [""]

    done = template.cookiecutter(output, typed="".join(f"{line}\n" for line in typed))

    refused = [f"{feature} must be yes or no; it is 'perhaps'." for feature in features()]
    assert_refused(done, output, template, *refused)


@pytest.mark.parametrize("answer", sparsely(TEMPLATES, "an expression", "Python in a block"))
def test_what_is_typed_is_refused_as_well(answer: str, template: Template, output: Path) -> None:
    typed = ["", "", answer, *("" for _ in QUESTIONS[3:])]

    done = template.cookiecutter(output, typed="".join(f"{line}\n" for line in typed))

    assert_refused(done, output, template, "description")


@pytest.mark.parametrize("answer", ["<<7 * 7>>", f"'); {TOUCH} #", "two\nlines", '"""', "a/b"])
def test_what_is_replayed_from_a_file_is_refused_as_well(
    answer: str, template: Template, output: Path
) -> None:
    replayed = output.parent / "replayed.json"
    answers = {**DEFAULTS, "package_name": answer, "description": answer + '"', "author": answer}
    replayed.write_text(json.dumps({"cookiecutter": answers}), "utf-8")

    done = template.cookiecutter(output, "--replay-file", str(replayed))

    assert_refused(done, output, template, "package_name", "description", "author")


def test_features_replayed_from_a_file_are_refused_in_the_same_words(
    template: Template, output: Path
) -> None:
    replayed = output.parent / "replayed.json"
    answers = {**DEFAULTS, **dict.fromkeys(features(), "maybe")}
    replayed.write_text(json.dumps({"cookiecutter": answers}), "utf-8")

    done = template.cookiecutter(output, "--replay-file", str(replayed))

    refused = [f"{feature} must be yes or no; it is 'maybe'." for feature in features()]
    assert_refused(done, output, template, *refused)


@pytest.mark.parametrize("answer", [*HOSTILE, *TEMPLATES])
def test_a_rendered_hook_holds_any_answer_as_text(answer: str) -> None:
    hook = (ROOT / "hooks" / "post_gen_project.py").read_text("utf-8")
    line = next(line for line in hook.splitlines() if line.startswith("ANSWERS = "))
    environment = jinja2.Environment(variable_start_string="<<", variable_end_string=">>")
    given = dict.fromkeys([*QUESTIONS, answer], answer)

    code = environment.from_string(line).render(cookiecutter=given)

    assert len(code.splitlines()) == 1
    found: dict[str, object] = {"json": json}
    exec(code, found)
    assert found["ANSWERS"] == given
    assert not Path(CANARY).exists()


@pytest.mark.parametrize("old", ["1.7.3", "2.5.0"])
def test_an_old_cookiecutter_is_told_how_to_become_new(
    old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_extensions, "version", lambda distribution: old)

    with pytest.raises(FailedHookException, match="pip install --upgrade"):
        local_extensions.Answers(jinja2.Environment())


@pytest.mark.parametrize("new", ["2.6.0", "2.10.1", "3.0.0"])
def test_a_new_cookiecutter_will_do(new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_extensions, "version", lambda distribution: new)

    local_extensions.Answers(jinja2.Environment())


def test_every_question_has_a_judge() -> None:
    asked = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))

    assert list(CHECKS) == QUESTIONS
    assert {question for question in asked if not question.startswith("_")} == set(CHECKS)

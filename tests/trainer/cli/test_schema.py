"""`lockstep schema`: what an editor completes and checks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lockstep.trainer.arguments import TrainerArguments
from lockstep.trainer.cli.config.load import SECTIONS
from lockstep.trainer.cli.main import main


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["schema"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_argument_has_its_default_and_description(schema: Any) -> None:
    arguments = schema["definitions"]["trainer"]["properties"]
    assert list(arguments) == [field.name for field in dataclasses.fields(TrainerArguments)]
    assert {name: found["default"] for name, found in arguments.items()} == {
        field.name: field.default for field in dataclasses.fields(TrainerArguments)
    }
    assert all(found["description"] for found in arguments.values())


def test_the_top_level_is_that_of_a_config(schema: Any) -> None:
    arguments = schema["definitions"]["trainer"]["properties"]
    assert set(schema["properties"]) == {*SECTIONS, *arguments}
    assert not schema["additionalProperties"] and not schema["definitions"]["trainer"]["additionalProperties"]


def test_types_are_those_of_the_arguments(schema: Any) -> None:
    arguments = schema["definitions"]["trainer"]["properties"]
    interpolation = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
    assert arguments["max_epochs"]["anyOf"] == [{"type": "integer"}, {"type": "null"}, interpolation]
    assert arguments["split_batches"]["anyOf"] == [{"type": "boolean"}, interpolation]
    assert {"type": "string"} in arguments["strategy"]["anyOf"]  # meshes, and names of other packages
    assert {"type": "string"} not in arguments["precision"]["anyOf"]
    callbacks = json.dumps(arguments["callbacks"])
    assert "EarlyStopping" in callbacks and '"Callback"' not in callbacks
    assert "EarlyStopping" not in json.dumps(arguments["logger"]) and "CSVLogger" in json.dumps(arguments["logger"])

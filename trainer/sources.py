"""Where configuration comes from: defaults < preset < TOML file < TRAINER_* < command line.

pydantic-settings merges the sources and pydantic checks the values; here every source is first
checked for keys that do not exist, so that the error can name the source and a likely key.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from trainer.config import PRESETS, Config, Section
from trainer.errors import ConfigError

__all__ = ["explain", "keys", "load", "read_arguments", "resolve", "to_toml"]

_ENV_PREFIX = "TRAINER_"
# A Kubernetes service called "trainer" puts these into every container of its namespace.
_KUBERNETES = re.compile(
    r"TRAINER_(\w+_)?(SERVICE_HOST|SERVICE_PORT\w*|PORT|PORT_\d+_(TCP|UDP|SCTP)\w*)"
)

Tree = dict[str, Any]


def keys() -> dict[str, str]:
    """Every key that can be set, dotted, in order, with what it means."""
    found: dict[str, str] = {}
    for name, field in Config.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            for leaf, inner in kind.model_fields.items():
                found[f"{name}.{leaf}"] = inner.description or ""
        else:
            found[name] = field.description or ""
    return found


def load(
    arguments: Sequence[str] = (),
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Resolve the configuration.

    `arguments` are the command line's ``--section.key value`` pairs as they came. Raises
    `ConfigError`, one sentence, for an unknown key, a bad value or a combination that cannot be.
    """
    return resolve(arguments, file=file, environ=environ)[0]


def resolve(
    arguments: Sequence[str] = (),
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Config, dict[str, str]]:
    """The configuration, and for each key that is not at its default where its value comes from.

    Raises as `load`.
    """
    variables = os.environ if environ is None else environ
    command_line = read_arguments(arguments)
    env_names = _environment(variables)
    from_file = _read_toml(file) if file is not None else {}

    origin: dict[str, str] = {}
    if file is not None:
        origin |= dict.fromkeys(_flat(from_file), f"in {file}")
    origin |= {key: f"in the variable {name}" for key, name in env_names.items()}
    origin |= dict.fromkeys(_flat(command_line), "on the command line")

    preset = (
        command_line.get("preset")
        or variables.get(env_names.get("preset", ""))
        or from_file.get("preset")
        or "cnn"
    )
    preset_values: Tree = dict(PRESETS.get(str(preset), {}))

    class Settings(BaseSettings, Config):
        model_config = SettingsConfigDict(extra="forbid", frozen=True, enable_decoding=False)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            environment = EnvSettingsSource(
                settings_cls, env_prefix=_ENV_PREFIX, env_nested_delimiter="__"
            )
            environment.env_vars = {name.lower(): variables[name] for name in env_names.values()}
            return (
                init_settings,
                environment,
                InitSettingsSource(settings_cls, init_kwargs=from_file),
                InitSettingsSource(settings_cls, init_kwargs=preset_values),
            )

    try:
        settings = Settings(**command_line)
    except ValidationError as error:
        raise ConfigError(_sentence(error, origin)) from None
    found = Config.model_validate({name: getattr(settings, name) for name in Config.model_fields})
    from_preset = dict.fromkeys(_flat(preset_values), f"in the preset {found.preset}")
    return found, from_preset | origin


def explain(key: str, config: Config, origin: Mapping[str, str]) -> list[str]:
    """What a key means, its value and where that comes from, what it may be, how to set it.

    Raises:
        ConfigError: there is no such key.
    """
    known = keys()
    if key not in known:
        raise ConfigError(f"there is no key {key}{_suggest(key, known)}")
    section, dot, leaf = key.rpartition(".")
    owner: type[Section] = Config
    value: Any = config
    if dot:
        kind = Config.model_fields[section].annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        owner, value = kind, getattr(config, section)
    field = owner.model_fields[leaf]
    default = field.get_default(call_default_factory=True)
    return [
        f"{key} = {_word(getattr(value, leaf))}  ({origin.get(key, 'the default')})",
        f"  {known[key]}",
        f"  may be    {_kinds(owner.model_json_schema()['properties'][leaf])}",
        f"  default   {_word(default)}",
        f"  set it    --{key} VALUE, {_ENV_PREFIX}{key.replace('.', '__').upper()}=VALUE, or "
        + (f"{leaf} = VALUE under [{section}] in a TOML file" if dot else f"{leaf} in a TOML file"),
    ]


def _word(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _kinds(schema: Mapping[str, Any]) -> str:
    """A JSON schema of a value in words: `auto or a whole number, at least 0`."""
    if "anyOf" in schema:
        return " or ".join(_kinds(part) for part in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    names = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "null": "none",
        "array": "numbers between commas",
    }
    bounds = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    words = ["a path" if schema.get("format") == "path" else names.get(schema.get("type", ""), "?")]
    words += [f"{said} {schema[name]:g}" for name, said in bounds.items() if name in schema]
    return ", ".join(words)


def read_arguments(arguments: Sequence[str]) -> Tree:
    """Turn ``--section.key value`` and ``--section.key=value`` into a tree of strings."""
    tree: Tree = {}
    known = keys()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f"unexpected argument {word!r}: options look like --section.key value"
            )
        name, equals, value = word[2:].partition("=")
        key = name.replace("-", "_")
        if key not in known:
            raise ConfigError(f"no such option: --{name}{_suggest(key, known, '--')}")
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} needs a value")
            value = rest.pop(0)
        _put(tree, key, value)
    return tree


def to_toml(config: Config) -> str:
    """The configuration as TOML that ``--config`` reads back to an equal one."""
    tree = config.model_dump(mode="json")
    lines: list[str] = []
    # A plain key after a table's header would belong to the table.
    for name, value in sorted(tree.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict):
            lines += ["", f"[{name}]"]
            lines += [f"{leaf} = {_toml(inner)}" for leaf, inner in value.items()]
        else:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if value is None:
        return '"none"'
    # For booleans, numbers and strings JSON's spelling is TOML's, DEL apart.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _read_toml(file: Path) -> Tree:
    try:
        with file.open("rb") as stream:
            tree = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    known = keys()
    for key in _flat(tree):
        if key not in known:
            raise ConfigError(f"unknown key {key} in {file}{_suggest(key, known)}")
    return tree


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Key -> name of the variable that sets it."""
    known = {f"{_ENV_PREFIX}{key.replace('.', '__').upper()}": key for key in keys()}
    found: dict[str, str] = {}
    for name in environ:
        if not name.startswith(_ENV_PREFIX) or _KUBERNETES.fullmatch(name):
            continue
        if name not in known:
            # Compared as a key: TRAINER_LOADER_BATCH_SIZE lacks one underscore.
            key = name.removeprefix(_ENV_PREFIX).lower().replace("__", ".")
            near = _nearest(key, dict.fromkeys(known.values(), ""))
            hint = f"; did you mean {_ENV_PREFIX}{near.replace('.', '__').upper()}?" if near else ""
            raise ConfigError(f"the variable {name} names no key{hint}")
        found[known[name]] = name
    return found


def _suggest(key: str, known: Mapping[str, str], prefix: str = "") -> str:
    near = _nearest(key, known)
    return f"; did you mean {prefix}{near}?" if near else ""


def _nearest(key: str, known: Mapping[str, str]) -> str | None:
    """The known key most like `key`: the same last word in another section first."""
    leaf = key.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    if len(same_leaf) == 1:
        return same_leaf[0]
    matches = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if matches:
        return matches[0]
    leaves = {name.rpartition(".")[2]: name for name in known}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return leaves[close[0]] if close else None


def _flat(tree: Tree) -> list[str]:
    flat: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            flat += [f"{key}.{leaf}" for leaf in value]
        else:
            flat.append(key)
    return flat


def _put(tree: Tree, key: str, value: str) -> None:
    section, dot, leaf = key.rpartition(".")
    if dot:
        tree.setdefault(section, {})[leaf] = value
    else:
        tree[leaf] = value


def _sentence(error: ValidationError, origin: Mapping[str, str]) -> str:
    """The first wrong value as one sentence that names it, its source and what would do."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    known = keys()
    parts = [str(part) for part in first["loc"]]
    key = ".".join(parts[:2]) if ".".join(parts[:2]) in known else parts[0]
    wanted: list[str] = []
    for problem in problems:
        # The alternatives of a union come as one problem each.
        if problem["loc"][: key.count(".") + 1] == first["loc"][: key.count(".") + 1]:
            message = problem["msg"].removeprefix("Input ").partition(", unable")[0]
            if message not in wanted:
                wanted.append(message)
    where = f" {origin[key]}" if key in origin else ""
    return f"{key}={first['input']}{where} is not possible: it {' or it '.join(wanted)}"

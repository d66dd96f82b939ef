"""
The door of every script: Hydra in, strict dataclasses out, and one clear line for a wrong input.

A script is a function under `@script("NAME")`: configs/NAME.yaml is its configuration, `key=value` on the command line
overrides it, `--help` prints its docstring and that file, whose comments say why each number is what it is.
"""

import difflib
import os
import re
import signal
import sys
import traceback
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CONFIGS = ROOT / "configs"


# keys whose values are any text: paths, prompts
TEXTS = ("ckpt", "ckpt2", "source", "data.source", "prompt", "shape.name", "draft", "out")


class InputError(ValueError):
    """A wrong input. Its message is one line: the value, what is allowed, the nearest fix. Scripts exit with code 2."""


def nearest(word, allowed, cutoff=0.5):
    """', did you mean X?' when something allowed is close to the word, whatever its case, else ''."""
    names = {str(a).lower(): a for a in allowed}
    match = difflib.get_close_matches(str(word).lower(), names, n=1, cutoff=cutoff)
    return f", did you mean {names[match[0]]}?" if match else ""


def strict(cls, values, where=""):
    """
    A dataclass from a mapping; a field that is itself a dataclass is built from the mapping under its name. Unknown names,
    missing values and wrong types are one InputError line naming them.
    """
    known = {f.name: f for f in fields(cls)}
    checked = {}
    for name, value in values.items():
        key = f"{where}.{name}" if where else name
        if name not in known:
            raise InputError(f"{key} is unknown{nearest(name, known)} (known: {', '.join(known)})")
        kind = known[name].type
        if is_dataclass(kind) and isinstance(value, dict):
            checked[name] = strict(kind, value, key)
            continue
        union = typing.get_origin(kind) in (types.UnionType, typing.Union)
        allowed = typing.get_args(kind) if union else (kind,)
        if float in allowed and type(value) is int:
            value = float(value)  # 1 is a fine learning rate; true is not
        if type(value) not in allowed:
            names = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
            raise InputError(f"{key}={value!r} is not allowed: it takes {names}")
        checked[name] = value
    missing = [name for name, f in known.items() if f.default is MISSING and name not in checked]
    if missing:
        raise InputError(f"{where + '.' if where else ''}{missing[0]} is missing: every run needs it")
    try:
        return cls(**checked)
    except ValueError as error:
        raise InputError(str(error)) from None


def named_blocks(config_name):
    """
    Blocks of a script's config that hold no more than a `name:`. There may be a folder of choices for them in configs/,
    but the script looks the name up, since it may be a path too: NAME=X, which to Hydra were a group, sets NAME.name.
    """
    return re.findall(r"^(\w+):\n  name:", (CONFIGS / f"{config_name}.yaml").read_text(), re.M)


def show_help(config_name, docstring):
    print(docstring.strip())
    groups = sorted(p for p in CONFIGS.iterdir() if p.is_dir())
    text = (CONFIGS / f"{config_name}.yaml").read_text()
    used = [g for g in groups if re.search(rf"^\s*- {g.name}:", text, re.M)]
    named = [g for g in groups if g.name in named_blocks(config_name)]
    if used or named:
        print("\nChoices:")
    for group in used + named:
        print(f"  {group.name}={'|'.join(sorted(p.stem for p in group.glob('*.yaml')))}   (configs/{group.name}/)")
    print(f"\nEvery key below can be set as key=value; configs/{config_name}.yaml says:\n")
    print(text)
    for group in used:
        default = re.search(rf"^\s*- {group.name}: (\w+)", text, re.M).group(1)
        if default != "null":
            print(f"# configs/{group.name}/{default}.yaml")
            print((group / f"{default}.yaml").read_text())


def explain(error, config_name, arguments=()):
    """One line from one of Hydra's or OmegaConf's errors, with the nearest key there is under these arguments' choices."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    message = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    message = re.sub(r"; (Config search path|See https|full_key).*", "", message).replace(":;", ":").replace("\t", "")
    groups = {p.name: sorted(c.stem for c in p.glob("*.yaml")) for p in CONFIGS.iterdir() if p.is_dir()}
    if "Config group override must be a string" in message:
        wrong = [a for a in arguments if (name := a.partition("=")[0]) in groups and a.partition("=")[2] not in groups[name]]
        name = wrong[0].partition("=")[0] if wrong else None
        return f"{wrong[0]} is no choice: {', '.join(groups[name])}" if wrong else message
    key = re.search(r"Could not (?:override|append to config)[^']*'([^']+)'", message)
    if not key:
        return message
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        flat, stack = (
            [],
            [("", OmegaConf.to_container(compose(config_name, [a for a in arguments if a.partition("=")[0] in groups])))],
        )
    while stack:
        prefix, node = stack.pop()
        for name, value in node.items():
            flat.append(prefix + name)
            if isinstance(value, dict):
                stack.append((f"{prefix}{name}.", value))
    return f"{key.group(1)} is no key of this script{nearest(key.group(1), flat)} (--help lists them)"


def quoted(argument):
    """key=value with the value quoted for Hydra where it is free text: '=', ',' or '(' in a path or a prompt is no grammar."""
    key, equals, value = argument.partition("=")
    if key not in TEXTS or not equals or value == "null" or (len(value) > 1 and value[0] == value[-1] and value[0] in "'\""):
        return argument
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", value)  # Hydra takes backslashes literally except before a quote
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped).replace("${", "\\${")
    return f"{key}='{escaped}'"


def script(config_name, settings):
    """
    Decorator: the function, given its composed config as the strict dataclass `settings`, becomes the script's main().
    In a multirun (-m) a failing job is named at once, the others go on, and the exit code tells in the end.
    """

    def decorate(function):
        def main():
            try:
                run()
                sys.stdout.flush()
            except BrokenPipeError:
                stop_writing()

        def run():
            arguments = sys.argv[1:]
            if any(a in ("--help", "-h") for a in arguments):
                show_help(config_name, sys.modules[function.__module__].__doc__)
                return
            os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, we say them in one line
            import hydra
            from hydra.errors import HydraException
            from omegaconf import OmegaConf
            from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

            multirun = any(a in ("-m", "--multirun") for a in arguments)
            for a in arguments:
                if a.startswith(("+", "~")):
                    fail(f"{a}: keys cannot be added or removed, only set as key=value (--help lists them)")
                if a.startswith("-") and a not in ("-m", "--multirun", "--cfg", "--resolve", "--info"):
                    fail(f"{a} is no option: set keys as key=value, several values with -m (--help lists them)")
            # Hydra takes its options before the keys only; here -m may stand anywhere
            sys.argv[1:] = arguments = sorted(arguments, key=lambda a: a not in ("-m", "--multirun", "--resolve"))
            for name in named_blocks(config_name):
                arguments = sys.argv[1:] = [re.sub(rf"^{name}=", f"{name}.name=", a) for a in arguments]
            if not multirun:  # in a multirun the comma of ckpt=a.pt,b.pt separates
                sys.argv[1:] = [quoted(a) for a in arguments]

            composed = []

            def task(cfg):
                composed.append(True)
                try:
                    try:
                        values = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
                    except MissingMandatoryValue as error:
                        raise InputError(f"{error.full_key}=… is needed (--help says what it is)") from None
                    return function(strict(settings, values))
                except BrokenPipeError:
                    stop_writing()
                except Exception as error:
                    if not multirun and isinstance(error, InputError):
                        fail(str(error))
                    if multirun:
                        what = " ".join(hydra.core.hydra_config.HydraConfig.get().overrides.task)
                        print(f"FAILED {what}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                        if not isinstance(error, InputError):
                            traceback.print_exc()
                    raise

            task.__module__ = function.__module__
            try:
                hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(task)()
            except (HydraException, OmegaConfBaseException) as error:
                fail(explain(error, config_name, arguments))
            except KeyboardInterrupt:
                print("interrupted: the same command continues where it stopped", file=sys.stderr)
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGINT)  # die of it, so that make and the shell stop too
            except Exception as error:
                if not composed and not multirun:  # Hydra has errors of other kinds too, model=null for one
                    fail(f"{' '.join(arguments)}: {explain(error, config_name, arguments)}")
                if not multirun:
                    raise
                # a worker killed by the system has had no chance to say FAILED itself
                print(f"error: at least one run failed ({type(error).__name__}: {error})", file=sys.stderr)
                sys.exit(1)

        return main

    return decorate


def stop_writing():
    """End without a word when nobody reads any more: `| head` has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


def fail(message):
    """End with one line: what came from a file or the command line may have been more."""
    line = " ".join(message.splitlines())
    print(f"error: {line if len(line) < 2000 else line[:2000] + '…'}", file=sys.stderr)
    sys.exit(2)

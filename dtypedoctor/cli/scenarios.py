"""``dtypedoctor scenarios``: the built-in scenarios."""

import json
import sys
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="scenarios", epilog="Example:  dtypedoctor scenarios --schema > scenario.schema.json")(scenarios)


def scenarios(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of scenario files, for editors, and exit.")
    ] = False,
) -> None:
    """List the built-in scenarios."""
    from dtypedoctor.cli.scenario_files import load_checked
    from dtypedoctor.scenario.dump import json_schema
    from dtypedoctor.scenario.loading import available

    if schema:
        print(json.dumps(json_schema(), indent=2))
        return
    found = [load_checked(path, allow_code=True) for path in available()]
    width = max((len(s.name) for s in found), default=0)
    for scenario in found:
        print(f"{scenario.name:<{width}}  {scenario.summary}")
    print("\nNext: dtypedoctor run NAME", file=sys.stderr)

"""Write ``docs/data/sbom.json``: a software bill of materials (CycloneDX) of what CI runs rankscope with.

Every package that rankscope and its extras lead to, in the version pinned in ``constraints/ci.txt``, with its licence
and the extras that bring it. Licences are read from the packages installed where this runs, so run it in an environment
that `./dev setup` made (needs cyclonedx-python-lib)::

    python scripts/write_sbom.py

The same pins and licences give the same bytes: there is no date in it, and its serial number is made from its content.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import tomllib
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.pin_hashes import OWN, installed, own_requirements, pins, requirements  # noqa: E402

BILL = ROOT / "docs" / "data" / "sbom.json"
FOR_CONTRIBUTORS = ("test", "test-all", "docs")
# What older metadata say in their own words.
SPELLINGS = {
    "apache 2.0": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0",
    "apache software license": "Apache-2.0", "apache license, version 2.0": "Apache-2.0", "mit license": "MIT",
    "3-clause bsd license": "BSD-3-Clause", "new bsd license": "BSD-3-Clause",
    "isc license (iscl)": "ISC", "isc license": "ISC",
    "bsd 2-clause license": "BSD-2-Clause", "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0", "the unlicense (unlicense)": "Unlicense",
}  # fmt: skip


def licence_of(name: str) -> str | None:
    """The SPDX expression of an installed package, its own words where there is none, None where it says nothing."""
    facts = distribution(name).metadata
    classifiers = [line.rpartition("::")[2].strip() for line in facts.get_all("Classifier") or []
                   if line.startswith("License ::")]  # fmt: skip
    written = (facts.get("License") or "").strip()
    short = [written] if 0 < len(written) < 60 and "\n" not in written else []
    said = [facts.get("License-Expression") or "", *short, *classifiers]
    found = next((one for one in said if one not in ("", "UNKNOWN", "OSI Approved")), None)
    return None if found is None else SPELLINGS.get(found.lower(), found)


def extras_by_package() -> dict[str, list[str]]:
    """Which extras bring each package; ``core`` for what comes with none."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    core = installed(set())
    found: dict[str, list[str]] = {name: ["core"] for name in core}
    for extra in sorted(extras):
        for name in installed({extra}) - core:
            found.setdefault(name, []).append(extra)
    return found


def bill() -> Any:
    """The bill, without date and serial number."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    versions, brought, licences = pins(), extras_by_package(), LicenseFactory()

    def component(name: str, version: str | None, kind: ComponentType, licence: str | None) -> Component:
        url = PackageURL("pypi", None, name, version)
        chosen = [] if licence is None else [licences.make_from_string(licence)]
        extra = [Property(name="rankscope:extras", value=", ".join(brought[name]))] if name in brought else []
        return Component(type=kind, name=name, version=version, purl=url, bom_ref=url.to_string(), licenses=chosen,
                         properties=extra)  # fmt: skip

    made = Bom()
    own = component(OWN, None, ComponentType.LIBRARY, "Apache-2.0")
    made.metadata.component = own
    parts = {name: component(name, versions[name], ComponentType.LIBRARY, licence_of(name)) for name in brought}
    made.components.update(parts.values())
    everything = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    direct = {canonicalize_name(need.name) for need in own_requirements(frozenset(everything))} - {OWN}
    made.register_dependency(own, [parts[name] for name in sorted(direct)])
    for name, part in parts.items():
        needs = {canonicalize_name(need.name) for need in requirements(name, frozenset())} & set(parts)
        made.register_dependency(part, [parts[need] for need in sorted(needs)])
    return made


def text() -> str:
    """The bill as it is checked in."""
    from cyclonedx.output.json import JsonV1Dot6

    found = json.loads(JsonV1Dot6(bill()).output_as_string())
    found["metadata"].pop("timestamp", None)
    found.pop("serialNumber", None)
    body = json.dumps(found, sort_keys=True)
    found["serialNumber"] = f"urn:uuid:{uuid5(NAMESPACE_URL, body)}"
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Write it, after the schema has been asked."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    written = text()
    if problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(written):
        raise SystemExit(f"This would be no CycloneDX document: {problem}")
    BILL.write_text(written)
    components = json.loads(written)["components"]
    silent = sorted(one["name"] for one in components if not one.get("licenses"))
    wild = sorted({re.sub(r"\s+", " ", one["license"]["name"]) for part in components
                   for one in part.get("licenses", ()) if "name" in one.get("license", {})})  # fmt: skip
    print(f"{BILL.relative_to(ROOT)}: {len(components)} packages; no licence given: {silent}; not SPDX: {wild}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

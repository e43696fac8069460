"""Print the requirements of a wheel, without the media packages that this study does not need.

python experiments/clients/requirements_of.py WHEEL
"""

import email
import sys
import zipfile

from pip._vendor.packaging.requirements import Requirement

NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")

with zipfile.ZipFile(sys.argv[1]) as wheel:
    (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(path))
for line in metadata.get_all("Requires-Dist"):
    requirement = Requirement(line)
    if requirement.name in NOT_NEEDED or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    requirement.marker = None
    print(requirement)

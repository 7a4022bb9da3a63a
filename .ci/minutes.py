"""Where the time of the tests went, by folder: ``python .ci/minutes.py tests.xml``."""

import collections
import sys
import xml.etree.ElementTree as ElementTree

seconds, count = collections.Counter(), collections.Counter()
for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    folder = case.get("classname", "").split(".")[:-1]
    name = "/".join(folder[:2]) or "tests"
    seconds[name] += float(case.get("time", 0))
    count[name] += 1
for name, total in seconds.most_common():
    print(f"{total / 60:6.1f} min  {count[name]:5} tests  {name}")
print(f"{sum(seconds.values()) / 60:6.1f} min  {sum(count.values()):5} tests  of all workers")

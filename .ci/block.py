"""Print a bash block of a page: block.py PAGE N, the first being 1."""

import re
import sys
from pathlib import Path

blocks = re.findall(r"^```bash\n(.*?)^```", Path(sys.argv[1]).read_text(), re.M | re.S)
print(blocks[int(sys.argv[2]) - 1].strip())

"""``python -m tools.backport``."""

import sys

from tools.backport.cli import main

sys.exit(main())

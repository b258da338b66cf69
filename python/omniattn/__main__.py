"""python -m omniattn."""

import sys

from omniattn.cli import main

sys.exit(main())

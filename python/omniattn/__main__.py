"""python -m omniattn."""

import sys

try:
    from omniattn.cli import main
except KeyboardInterrupt:  # imports take seconds; later ones are told by main
    print("omniattn: interrupted", file=sys.stderr)
    sys.exit(130)

sys.exit(main())

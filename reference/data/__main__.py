"""`python -m reference.data prepare | inspect`."""

import sys

from reference.data.prepare_command import main

if __name__ == "__main__":  # worker processes import this file, too
    sys.exit(main())

"""`python -m reference.data prepare | inspect`."""

import sys

if __name__ == "__main__":  # worker processes import this file, too
    from reference.data.prepare_command import main

    sys.exit(main())

"""A program for the tests of the fork server: it shows what it was given and ends as it is told. Not a test."""

import os
import sys
from pathlib import Path

print(Path.cwd(), dict(os.environ), sys.argv[1:], flush=True)
match sys.argv[1]:
    case "exit":
        sys.exit(7)
    case "complain":
        sys.exit("no such luck")
    case "wait":
        sys.stdin.read()

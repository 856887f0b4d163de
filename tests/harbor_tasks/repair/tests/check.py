import sys

sys.path.insert(0, sys.argv[1])
from prices import total

assert total([3, 4, 5]) == 12
assert total([]) == 0

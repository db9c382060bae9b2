#!/usr/bin/env python3
"""A reliable walk costs at most 1.3 times what a best-effort one does, wherever walk_bench measures both (semantics: S41).

usage: walk_ratio.py WALK_BENCH [AT_MOST]
"""
import re
import subprocess
import sys

bench, at_most = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 1.3
printed = subprocess.run([bench, "--rounds", "5"], stdout=subprocess.PIPE, text=True, check=True).stdout
print(printed)
row = re.search(r"^reliable / best effort +(.*)$", printed, re.M)
ratios = [float(word) for word in row[1].split()] if row else []
if len(ratios) < 9:
    sys.exit(f"FAILED: {len(ratios)} ratios were measured")
print(f"{'ok' if max(ratios) <= at_most else 'FAILED'}: at most {max(ratios)} times, {at_most} is the bound")
sys.exit(max(ratios) > at_most)

#!/bin/sh
# Checks the Promela models (a hold, the pair's inbox) exhaustively, then demands that every mutant of them fails.
#
# Needs spin and a C compiler. Exit 0: no error in the models and an assertion violated in every mutant.
# Exit 1 otherwise. Exit 3: spin or the compiler is missing, so nothing was checked.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
model=$root/docs/models/hold.pml
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for tool in spin gcc; do
  command -v "$tool" >/dev/null || { echo "NOT RUN: $tool is not installed" >&2; exit 3; }
done

# search NAME DEFINE...: builds a verifier and runs it to the end; prints the verifier's own report to NAME.txt.
search() {
  name=$1
  shift
  mkdir -p "$work/$name"
  (
    cd "$work/$name"
    spin -a "$@" "$model" >spin.txt 2>&1 || { cat spin.txt >&2; exit 1; }
    # -w: spin's generated code, not ours.
    gcc -w -O1 -DSAFETY -DCOLLAPSE -DMEMLIM=2048 -o pan pan.c
    # A truncated search (depth or memory) would be no proof: pan says so and the caller looks for it.
    ./pan -m100000 >"../$name.txt" 2>&1 || true
  )
  rm -rf "${work:?}/$name"
}

failed=0

prove() {
  name=$1
  shift
  search "$name" "$@"
  states=$(sed -n 's/^ *\([0-9e+.]*\) states, stored$/\1/p' "$work/$name.txt")
  if grep -q 'errors: 0$' "$work/$name.txt" && ! grep -Eq 'too small|not completed|out of memory|memory limit' "$work/$name.txt"; then
    echo "model  $name: $states states, errors: 0"
  else
    echo "model  $name: FAILED" >&2
    cat "$work/$name.txt" >&2
    failed=1
  fi
}

refute() {
  name=$1
  shift
  search "$name" "-DMUTANT_$name" "$@"
  if grep -q 'assertion violated' "$work/$name.txt"; then
    echo "mutant $name: refused, $(sed -n 's/^pan:1: //p' "$work/$name.txt" | cut -c1-90)"
  else
    echo "mutant $name: NOT REFUSED" >&2
    cat "$work/$name.txt" >&2
    failed=1
  fi
}

prove one-host-two-coordinators -DNH=1 -DCOORDINATORS=2 -DFAULTS=3
prove two-hosts-two-faults -DNH=2 -DCOORDINATORS=1 -DFAULTS=2
prove two-hosts-two-coordinators -DNH=2 -DCOORDINATORS=2 -DFAULTS=0

refute NO_EPOCH -DNH=1 -DCOORDINATORS=2 -DFAULTS=2
refute GRANT_IN_DEBT -DNH=1 -DCOORDINATORS=2 -DFAULTS=2
refute CLOSE_WITHOUT_PROOF -DNH=1 -DCOORDINATORS=2 -DFAULTS=2
refute RESUME_AFTER_REBOOT -DNH=1 -DCOORDINATORS=1 -DFAULTS=2
refute TRANSIENT_DEAD_MAN -DNH=1 -DCOORDINATORS=1 -DFAULTS=2
refute DISARM_FIRST -DNH=1 -DCOORDINATORS=1 -DFAULTS=2
refute STOP_UNARMED -DNH=1 -DCOORDINATORS=1 -DFAULTS=2
refute NO_LOCK -DNH=1 -DCOORDINATORS=1 -DFAULTS=2
refute RUNS_SURVIVE -DNH=1 -DCOORDINATORS=1 -DFAULTS=2
refute DEBT_LOST_ON_DISK -DNH=1 -DCOORDINATORS=2 -DFAULTS=2

model=$root/docs/models/inbox.pml
faults="-DMAY_DIE=true -DMAY_ERR=true"

prove inbox-healthy -DDEPTH=3 -DCHAINS=3
prove inbox-faults -DDEPTH=3 -DCHAINS=3 $faults
prove inbox-last-epoch -DDEPTH=2 -DCHAINS=3 -DLIMIT=5 $faults

refute NO_NONCE $faults
refute NO_EPOCH $faults
refute ONE_SLOT $faults
refute READ_BEFORE_RELEASE $faults
refute NO_COMPARE $faults
refute NO_SETTLE $faults
refute SILENT $faults

exit $failed

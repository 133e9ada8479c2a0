# Sourced by scripts that define jobs and together, each of which prints a line a process: its name, then what python -m lab eval is given.
# What stands in OUT/parts is not run again; those of `together` (all-NAME) start from the lines of all NAME-*.

run() { # OUT NAME ARGUMENTS...
  local out=$1 name=$2 begin=$SECONDS
  shift 2
  [ -s "$out/parts/$name.done" ] && return
  case $name in all-*) cat "$out/parts/${name#all-}"-*.jsonl > "$out/parts/$name.jsonl" ;; esac
  local command="lab eval" json=--json
  case $1 in recall | drift) command=lab.recall json= ;; esac
  if python3 -m $command "$@" $json --out "$out/parts/$name.jsonl" > "$out/parts/$name.json" 2> "$out/parts/$name.err"; then
    mv "$out/parts/$name.json" "$out/parts/$name.done"
    echo "$name: $((SECONDS - begin)) s"
  else
    echo "$name FAILED: $(tail -1 "$out/parts/$name.err")" >&2
    return 1
  fi
}
export -f run

side_by_side() { # OUT PROCESSES
  local status=0
  jobs | xargs -r -P "$2" -L 1 bash -c 'run "$@"' _ "$1" || status=1
  together | xargs -r -P "$2" -L 1 bash -c 'run "$@"' _ "$1" || status=1
  return $status
}

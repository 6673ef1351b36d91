# Runs once on each node, beside the ranks: brings their Python environment to the node's own disk.
# $1: private folder of the job, $2: folder of the environment in it, $3: copy of the archive, $4: its kind, $5: its KiB.
# A mounted archive stays until standard input ends.
set -o pipefail
umask 077

say() { printf '%s\t%s\t%s\n' "$SLURMD_NODENAME" "$1" "$2"; }

fail() {
    say failed "$(tail -n 1 <<<"$1")"
    exit 0
}

# Prints why the environment cannot be used.
try() {
    local code='import sys, rlhpc; sys.prefix == sys.argv[1] or sys.exit("its sys.prefix is " + sys.prefix)'
    "$1/bin/python" -c "$code" "$1" 2>&1
}

unmount() { fusermount3 -uz "$1" || fusermount -uz "$1" || umount -l "$1"; } 2>/dev/null

# Mounts archive $1 at $2, by a process that runs until it is unmounted.
mount_image() {
    command -v squashfuse >/dev/null && [ -w /dev/fuse ] && mkdir -p "$2" || return 1
    squashfuse -f -o ro "$1" "$2" </dev/null >/dev/null 2>&1 &
    for _ in {1..50}; do
        [ ! -x "$2/bin/python" ] || return 0
        kill -0 $! 2>/dev/null || break
        sleep 0.1
    done
    unmount "$2"
    return 1
}

# Unpacks archive $1 of kind $3 into $2.
unpack() {
    case $3 in
        squashfs) unsquashfs -q -n -f -d "$2" "$1" ;;
        tar.zst) zstd -dcq -- "$1" | tar -xf - -C "$2" --no-same-owner ;;
        *) tar -xf "$1" -C "$2" --no-same-owner ;;
    esac 2>&1
}

mkdir -p -m 700 "$1" 2>/dev/null
[ -d "$1" ] && [ ! -L "$1" ] && [ -O "$1" ] && [ -w "$1" ] || fail "$1 cannot be made, or is another user's"
if [ -e "$2/.complete" ]; then
    say ready "$SLURM_STEP_ID"
    exit 0
fi
[ "$4" != squashfs ] || unmount "$2" # by a step that was killed
if [ ! -e "$3.kept" ]; then
    rm -f "$3" "$3.whole"
    room=$(df -Pk "$1" | tail -n 1 | awk '{print $4}')
    [ "$room" -gt "$5" ] || fail "$1 has $room KiB left, the archive has $5"
    say waits "$SLURM_STEP_ID"
    until [ -e "$3.whole" ]; do sleep 0.2; done # sbcast writes it after the archive
fi
if [ "$4" = squashfs ] && mount_image "$3" "$2"; then
    : >"$3.kept"
    if error=$(try "$2"); then say mounted "$SLURM_STEP_ID"; else say failed "$(tail -n 1 <<<"$error")"; fi
    cat >/dev/null
    unmount "$2"
    exit 0
fi
rm -rf "$2" "$2.part"
mkdir "$2.part" || fail "$2.part cannot be made"
error=$(unpack "$3" "$2.part" "$4") || fail "$error"
rm -f "$3" "$3.whole" "$3.kept"
[ -x "$2.part/bin/python" ] || fail "the archive has no bin/python"
mv "$2.part" "$2" || fail "$2 cannot be made"
if [ -x "$2/bin/conda-unpack" ]; then
    error=$("$2/bin/python" "$2/bin/conda-unpack" 2>&1) || fail "$error"
fi
error=$(try "$2") || fail "$error"
: >"$2/.complete"
say ready "$SLURM_STEP_ID"

"""Run by gdb: for each line "same|new LIMIT" on standard input, the pcs of the stack as one line on descriptor 3."""
import os

import gdb

for command in ("confirm off", "pagination off", "height 0", "sysroot /", "backtrace past-main on", "stack-cache off", "code-cache off",
                "debuginfod enabled off", "auto-load no", "remotetimeout 100", "print inferior-events off"):
    try:
        gdb.execute("set " + command, to_string=True)
    except gdb.error:
        pass
gdb.execute("file " + os.environ["STEP_PROGRAM"])


def stack(limit):
    pcs, frame = [], gdb.newest_frame()
    while frame is not None and len(pcs) < limit:
        if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME):
            pcs.append(frame.pc())
        try:
            frame = frame.older()
        except gdb.error:
            break
    return pcs


connected = False
source = os.fdopen(0)
for line in iter(source.readline, ""):
    kind, limit = line.split()
    try:
        if kind == "new":
            if connected:
                gdb.execute("disconnect", to_string=True)
            gdb.execute("target remote " + os.environ["STEP_SOCKET"], to_string=True)
            connected = True
        gdb.execute("maintenance flush register-cache", to_string=True)
        answer = " ".join(f"{pc:x}" for pc in stack(int(limit)))
    except gdb.error as error:
        answer = f"failed: {error}"
    os.write(3, (answer.replace("\n", " ") + "\n").encode())

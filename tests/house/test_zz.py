import os, signal
def test_die(mysql_like):
    os.system("ps -o pid,args -C mariadbd,ld-linux-x86-64 | cut -c1-80 >&2")
    os.kill(os.getpid(), signal.SIGKILL)

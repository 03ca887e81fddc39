"""This process's JVM with the jars of BookKeeper's client, and waits for Java's futures.

JPype's rules: one JVM a process, never restarted, and no fork afterwards; no wait without an end on the main thread,
since a signal is delivered between waits only; no boxed number and no exception of Java may cross into Python on a path
that repeats, since JPype 1.7 leaks both; a thread that called Java is detached from it before it ends.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from outbox_core.common.errors import ConfigurationError

JARS_VARIABLE: Final = "OUTBOX_BOOKKEEPER_JARS"
JARS_MODULE: Final = "outbox_mq_bookkeeper_jars"
CLIENT_VERSION: Final = "4.18"
# Maven names a jar by its artifact, BookKeeper's own distribution by group and artifact.
_SERVER_JAR: Final = re.compile(r"(?:org\.apache\.bookkeeper-)?bookkeeper-server-(\d+\.\d+)\.[\w.-]+\.jar")
JARS_CURE: Final = (
    f"set {JARS_VARIABLE} to the lib folder of an installation of BookKeeper {CLIENT_VERSION}, or install the wheel "
    "outbox-mq-bookkeeper-jars, which deploy/bookkeeper-jars/build makes in a checkout"
)
_INTERRUPTIBLE_MS: Final = 200
LOGGING_CONFIG: Final = Path(__file__).with_name("log4j2.xml")
REFLECTION_OPTIONS: Final = (
    "-Dio.netty.tryReflectionSetAccessible=true",
    *(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in ("java.nio", "jdk.internal.misc", "java.io", "java.util.zip", "sun.nio.ch")
    ),
)
"""What netty and BookKeeper reach into, on Java 17 and later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JvmOptions:
    """`jvm`: the path of libjvm.so, if not Java's usual place. `arguments` are added to the JVM's."""

    heap_mb: int = 128
    direct_mb: int = 64
    logging_config: Path = LOGGING_CONFIG
    jvm: Path | None = None
    arguments: tuple[str, ...] = ()


class JavaRuntime:
    """The JVM that start() started. Thread-safe."""

    _guard = threading.Lock()
    _started: JavaRuntime | None = None

    def __init__(self, jpype: Any, jars: Path) -> None:
        """Called by start() only."""
        self.jars = jars
        self._jpype = jpype
        self._process = os.getpid()
        self._detach = jpype.JClass("java.lang.Thread").detach
        self._thread = threading.local()
        self._future = jpype.JClass("java.util.concurrent.CompletableFuture")
        self._milliseconds = jpype.JClass("java.util.concurrent.TimeUnit").MILLISECONDS
        # Makes of a failed future one that has the exception for its value: it is returned, and never raised.
        self._as_value = jpype.JClass("java.util.function.Function").identity()

    @classmethod
    def start(cls, *, jars: Path, options: JvmOptions | None = None) -> JavaRuntime:
        """Start the JVM, or return the one that runs with these jars. Raises ConfigurationError that names the cure."""
        with cls._guard:
            if cls._started is None:
                check_jars(jars)
                cls._started = cls(_started_jpype(jars, options or JvmOptions()), jars)
            elif cls._started.jars != jars:
                raise ConfigurationError(
                    f"this process's JVM runs with the jars of {cls._started.jars}, and cannot be started again with "
                    f"those of {jars}: restart the process"
                )
        cls._started.check_process()
        return cls._started

    def java_class(self, name: str) -> Any:
        """Returns a class of Java."""
        return self._jpype.JClass(name)

    def byte_array(self, value: bytes) -> Any:
        """Returns a byte[] of Java."""
        return self._jpype.JArray(self._jpype.JByte)(value)

    def string(self, value: str) -> Any:
        """Returns a String of Java."""
        return self._jpype.JString(value)

    def implementation(self, interface: str, methods: Mapping[str, Callable[..., Any]]) -> Any:
        """Returns an object of Java whose methods are functions of Python; all have to be there, defaults too."""
        return self._jpype.JProxy(interface, dict=dict(methods))

    def call_of(self, target: Any, method: str, *, interface: str) -> Any:
        """Returns an object of Java whose one method ignores its argument and calls a method of `target` that has none.

        All of it is Java: a thread of Java's that is in the interpreter as that ends would abort the process.
        """
        handles, proxies = (self._jpype.JClass(f"java.lang.invoke.MethodHandle{kind}") for kind in ("s", "Proxies"))
        call = handles.publicLookup().unreflect(target.getClass().getMethod(self.string(method))).bindTo(target)
        ignoring = handles.dropArguments(call, 0, self._jpype.JClass("java.lang.Object").class_)
        return proxies.asInterfaceInstance(self._jpype.JClass(interface).class_, ignoring)

    def check_process(self) -> None:
        """Raise ConfigurationError in a child process: its JVM's threads did not come with the fork. Called by each
        thread that uses Java, which is detached from it as it ends.
        """
        if not hasattr(self._thread, "end") and threading.current_thread() is not threading.main_thread():
            self._thread.end = _ThreadEnd(self._detach)
        if os.getpid() != self._process:
            raise ConfigurationError(
                "this process was forked after its JVM started, and cannot use it: start a new process instead"
            )

    def wait(self, future: Any, *, timeout_ms: int) -> bool:
        """Wait until a future is done, in slices between which signals are delivered; False after the time-out."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not future.isDone():
            if time.monotonic() > deadline:
                return False
            settled = self._future.allOf(future).exceptionally(self._as_value)
            settled.completeOnTimeout(None, _INTERRUPTIBLE_MS, self._milliseconds).get()
        return True

    def failure(self, future: Any) -> Any:
        """Returns the exception of a future that is done, as an object; None if it succeeded."""
        if not future.isCompletedExceptionally():
            return None
        found = self._future.allOf(future).exceptionally(self._as_value).get()
        while found.getCause() is not None and not hasattr(found, "getCode"):
            found = found.getCause()
        return found


class _ThreadEnd:
    """Kept by a thread alone, so deleted as the thread ends. JPype attaches threads to Java, and detaches none."""

    def __init__(self, detach: Callable[[], None]) -> None:
        self._detach = detach

    def __del__(self) -> None:
        self._detach()


def find_jars(environment: Mapping[str, str]) -> Path:
    """Returns the folder of BookKeeper's jars: the operator's own, or those of the wheel. Raises ConfigurationError."""
    named = environment.get(JARS_VARIABLE)
    if named:
        folder = Path(named.removesuffix("*").rstrip("/") or "/")
        if not folder.is_dir():
            raise ConfigurationError(f"{JARS_VARIABLE} names {folder}, which is no folder; {JARS_CURE}")
        return folder
    spec = find_spec(JARS_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(f"the jars of BookKeeper's client are missing; {JARS_CURE}")
    return Path(next(iter(spec.submodule_search_locations))) / "jars"


def check_jars(folder: Path) -> None:
    """Raise ConfigurationError unless a folder has the jars of the client's version."""
    found = sorted(match[1] for path in folder.glob("*.jar") if (match := _SERVER_JAR.fullmatch(path.name)))
    if not found:
        raise ConfigurationError(f"{folder} has no bookkeeper-server jar; {JARS_CURE}")
    if found != [CLIENT_VERSION]:
        raise ConfigurationError(f"{folder} has BookKeeper {', '.join(found)}, not {CLIENT_VERSION}; {JARS_CURE}")


def _started_jpype(jars: Path, options: JvmOptions) -> Any:
    try:
        import jpype
        import jpype.config
    except ImportError as error:
        raise ConfigurationError("JPype is missing: pip install JPype1, which the extra bookkeeper brings") from error
    if jpype.isJVMStarted():
        raise ConfigurationError("another library started this process's JVM, with jars of its own: use two processes")
    try:
        jvm = str(options.jvm) if options.jvm is not None else jpype.getDefaultJVMPath()
    except jpype.JVMNotFoundException as error:
        raise ConfigurationError("there is no Java: install Java 17 or later, or set JAVA_HOME") from error
    # Without it, the interpreter's exit waits for ever for a client that was not closed.
    jpype.config.destroy_jvm = False
    try:
        jpype.startJVM(
            "-Xrs",  # signals stay Python's
            f"-Xmx{options.heap_mb}m",
            f"-XX:MaxDirectMemorySize={options.direct_mb}m",
            "-XX:+UseSerialGC",
            f"-Dlog4j2.configurationFile={options.logging_config}",
            *REFLECTION_OPTIONS,
            *options.arguments,
            jvmpath=jvm,
            classpath=[f"{jars}/*"],
            convertStrings=False,
        )
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"the JVM {jvm} does not start: {error}; install Java 17 or later") from error
    # This thread of Java's releases Python's objects. If it does so while the interpreter ends, the process aborts.
    atexit.register(jpype.JClass("org.jpype.ref.JPypeReferenceQueue").getInstance().stop)
    return jpype

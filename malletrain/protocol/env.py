"""Every environment variable of MalleTrain: its name and its meaning. Decides nothing.

Imports nothing, because helper scripts that run by their path without site-packages read it too.
The scavenger package, which does not import malletrain, has its own copies of the names of the
lease's variables.
"""

from __future__ import annotations

AGENT = "MALLETRAIN_AGENT"
ARRAY_INDEX = "MALLETRAIN_ARRAY_INDEX"
CHECKPOINT_DIR = "MALLETRAIN_CHECKPOINT_DIR"
CLUSTER = "MALLETRAIN_CLUSTER"
CONFIG = "MALLETRAIN_CONFIG"
DAEMON = "MALLETRAIN_DAEMON"
DAEMON_ID = "MALLETRAIN_DAEMON_ID"
DATA = "MALLETRAIN_DATA"
DATA_MEMORY = "MALLETRAIN_DATA_MEMORY"
DEBUG = "MALLETRAIN_DEBUG"
ENDPOINT = "MALLETRAIN_ENDPOINT"
FAULTS = "MALLETRAIN_FAULTS"
FLAGS = "MALLETRAIN_FLAGS"
FORK_SERVER = "MALLETRAIN_FORK_SERVER"
GENERATION = "MALLETRAIN_GENERATION"
GPU_BACKEND = "MALLETRAIN_GPU_BACKEND"
GPUS = "MALLETRAIN_GPUS"
GRACE_S = "MALLETRAIN_GRACE_S"
HAND_OVER = "MALLETRAIN_HAND_OVER"
HEALTH = "MALLETRAIN_HEALTH"
HOST = "MALLETRAIN_HOST"
JOB = "MALLETRAIN_JOB"
JOB_KEY = "MALLETRAIN_JOB_KEY"
KEEPER = "MALLETRAIN_KEEPER"
LAUNCHER_PID = "MALLETRAIN_LAUNCHER_PID"
LEASE = "MALLETRAIN_LEASE"
LEASE_KEY = "MALLETRAIN_LEASE_KEY"
LIVE = "MALLETRAIN_LIVE"
LOADER_WORKERS = "MALLETRAIN_LOADER_WORKERS"
LOG_DIR = "MALLETRAIN_LOG_DIR"
LOG_LEVEL = "MALLETRAIN_LOG_LEVEL"
MAX_WORLD_SIZE = "MALLETRAIN_MAX_WORLD_SIZE"
MAX_WORLD_SIZE_OF_LAYOUTS = "MALLETRAIN_MAX_WORLD_SIZE_OF_LAYOUTS"
MEMORY = "MALLETRAIN_MEMORY"
MEMORY_LIMIT = "MALLETRAIN_MEMORY_LIMIT"
MUNGE_SOCKET = "MALLETRAIN_MUNGE_SOCKET"
NODE = "MALLETRAIN_NODE"
NODE_CLASS = "MALLETRAIN_NODE_CLASS"
PRELOAD = "MALLETRAIN_PRELOAD"
RESUME_FROM = "MALLETRAIN_RESUME_FROM"
RUN_DIR = "MALLETRAIN_RUN_DIR"
SERVER_KEY = "MALLETRAIN_SERVER_KEY"
SERVICE = "MALLETRAIN_SERVICE"
SHARING = "MALLETRAIN_SHARING"
SLOT = "MALLETRAIN_SLOT"
SLOT_CPUS = "MALLETRAIN_SLOT_CPUS"
SLOT_MEMORY_MB = "MALLETRAIN_SLOT_MEMORY_MB"
SOCKET = "MALLETRAIN_SOCKET"
STATE_DIR = "MALLETRAIN_STATE_DIR"
STEP_TIMES = "MALLETRAIN_STEP_TIMES"
SWEEPS = "MALLETRAIN_SWEEPS"
TASK = "MALLETRAIN_TASK"
THREADS = "MALLETRAIN_THREADS"
TIMEOUT = "MALLETRAIN_TIMEOUT"
TRACK = "MALLETRAIN_TRACK"
TRIAL = "MALLETRAIN_TRIAL"
TRIAL_FOLDER = "MALLETRAIN_TRIAL_FOLDER"
UMASK = "MALLETRAIN_UMASK"
WEB_TOKEN = "MALLETRAIN_WEB_TOKEN"

TABLE = (
    (STATE_DIR, "Directory of a user's daemon: its keys, database and logs. Used by the "
     "daemon, too, if its configuration file names none.", "user", "cli, daemon"),
    (DAEMON, "File with the address of a daemon.", "user", "cli, client"),
    (CONFIG, "Configuration file of the daemon.", "user", "cli"),
    (SWEEPS, "URL of the database of sweeps, if it is not in the state directory.", "user",
     "cli"),
    (TIMEOUT, "Timeout for an answer of the daemon, seconds; 10 if not set.", "user", "client"),
    (DEBUG, "If not empty, an unexpected error shows its traceback.", "user", "cli"),
    (FAULTS, "Folder of the fault points at which tests kill processes.", "tests", "all"),
    (MUNGE_SOCKET, "Socket of munged, if it is not the default one.", "user", "client"),
    (WEB_TOKEN, "Token of the page, instead of a random one.", "user", "cli"),
    (PRELOAD, "Modules that a node imports once for all workers; `0`: each worker is a new Python.",
     "user", "launch"),
    (GPU_BACKEND, "`gloo`: live mode exchanges tensors of GPUs through host memory, for processes "
     "that share a GPU; by NCCL if not set.", "user", "elastic"),
    (TRACK, "Tools that also get the values of `malletrain.metric`: `wandb`, `mlflow`, separated "
     "by a comma.", "user", "training"),
    (LOG_LEVEL, "Level of the agent's log, `INFO` if not set.", "user", "agent"),
    (ENDPOINT, "Address of the daemon.", "daemon", "agent"),
    (SERVER_KEY, "Public key of the daemon.", "daemon", "agent"),
    (LEASE_KEY, "Secret key of the lease; the agent takes it out of its environment.", "daemon",
     "agent"),
    (RUN_DIR, "Directory on the node for sockets and logs.", "daemon", "agent"),
    (LEASE, "Id of the lease.", "scavenger, agent", "agent"),
    (NODE, "Name of the node in the main scheduler.", "scavenger, agent",
     "agent, launch, membership"),
    (NODE_CLASS, "Class of the node.", "scavenger", "agent"),
    (GPUS, "GPUs of the node; counted if not set.", "lease script", "agent"),
    (GRACE_S, "Seconds between SIGTERM and SIGKILL of a preempted lease.", "daemon, scavenger",
     "agent"),
    (HEALTH, "The health checks of the agent's node, as JSON.", "daemon", "agent"),
    (SHARING, "How the processes of a slot behave towards other jobs on the host, as JSON.",
     "daemon", "agent"),
    (SLOT, "Kind and number of the slot; not set for a whole node.", "scavenger", "lease script"),
    (SLOT_CPUS, "Processors of the slot.", "scavenger, agent", "agent, launch"),
    (SLOT_MEMORY_MB, "Memory of the slot, MiB.", "scavenger, agent", "agent, launch"),
    (CLUSTER, "Directory of the embedded cluster that a process belongs to.", "scavenger",
     "scavenger"),
    (HOST, "Address under which other nodes reach this one.", "user, agent",
     "agent, launch, membership"),
    (JOB, "Id of the job.", "agent", "training"),
    (DAEMON_ID, "Name of the daemon whose job it is; snapshots record it.", "agent", "training"),
    (ARRAY_INDEX, "Index of a job of an array (`submit --array`).", "cli", "script"),
    (TASK, "Number of the task of a farm, from 0.", "launch", "script"),
    (CHECKPOINT_DIR, "Directory in which a task of a farm keeps what another try continues from.",
     "launch", "script"),
    (TRIAL, "Number of the trial that a sweep's job is.", "sweep", "script"),
    (TRIAL_FOLDER, "Folder of the trial in its output folder, if the sweep's arguments do "
     "not name one with `{trial}`.", "sweep", "integrations"),
    (UMASK, "File mode creation mask of the job's processes, octal: that of the command that "
     "submitted the job.", "cli, client", "launch"),
    (RESUME_FROM, "Job or path from whose snapshot the job may start (`--resume-from`).", "cli",
     "training"),
    (JOB_KEY, "Secret that all processes of the job share, as hexadecimal text.", "agent",
     "launch, training, membership"),
    (MEMORY, "Folder in the node's memory for the job's snapshots.", "agent", "launch, training"),
    (MEMORY_LIMIT, "Maximum size of that folder, bytes.", "agent", "launch, training"),
    (HAND_OVER, "Bytes that a leaving node can hand over to another in time.", "daemon",
     "training"),
    (KEEPER, "Address at which other nodes of the job reach the snapshots in that folder.",
     "launch",
     "training"),
    (DATA, "Folder in the node's memory for data caches; all jobs on the node use it.", "agent",
     "launch, training"),
    (DATA_MEMORY, "Memory of a node for a data cache whose script names none (`--data-memory`).",
     "cli", "training"),
    (SOCKET, "Socket on which the agent takes the workers' reports.", "agent", "training"),
    (STEP_TIMES, "`1`: the agent accepts the parts of steps in the workers' reports.", "agent",
     "training"),
    (FLAGS, "File that holds the number of the requested drain.", "agent", "training"),
    (MAX_WORLD_SIZE, "Number of the job's processes at its maximum number of nodes.", "agent",
     "training"),
    (MAX_WORLD_SIZE_OF_LAYOUTS, "The same number in the layout of a node with the most processes, "
     "if that is found by measuring (`--nproc-per-node auto`).", "agent", "training"),
    (LOADER_WORKERS, "Number of loader workers of each process, for DataLoaders of the script that "
     "name none (`--loader-workers`).", "launch", "training, script"),
    (THREADS, "The number in `OMP_NUM_THREADS`, if MalleTrain has chosen it (also with "
     "`--threads auto`) and not the job.", "launch", "script"),
    (AGENT, "Socket on which the agent talks with the launcher.", "agent", "launch"),
    (GENERATION, "Number of the round that a worker was started for.", "launch",
     "training, elastic"),
    (LAUNCHER_PID, "Process id of the launcher; the workers end with it.", "launch", "launch"),
    (FORK_SERVER, "Socket of the fork server.", "launch", "launch"),
    (LIVE, "Socket on which the launcher of a live job talks with its workers.", "launch",
     "elastic"),
    (LOG_DIR, "Directory of the logs of a live job's workers.", "launch", "elastic"),
    (SERVICE, "Socket on which the launcher of a service talks with its process.", "launch",
     "membership"),
)  # fmt: skip
"""(name, meaning, set by, read by), in the order of the docs."""

import enum

class SegmentView:
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Segment:
    @staticmethod
    def create(
        name: str,
        payload_bytes: int,
        kind: int,
        lifetime: int,
        epoch: int,
        layout_version: int,
        digest: bytes,
    ) -> Segment: ...
    @staticmethod
    def attach(
        name: str,
        writable: bool,
        total_bytes: int | None,
        epoch: int | None,
        layout_version: int | None,
        digest: bytes | None,
    ) -> Segment: ...
    @property
    def name(self) -> str: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def is_owner(self) -> bool: ...
    @property
    def is_writable(self) -> bool: ...
    @property
    def is_sealed(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def kind(self) -> int: ...
    @property
    def lifetime(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def layout_version(self) -> int: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def owner_pid(self) -> int: ...
    def seal(self) -> None: ...
    def mark_ready(self) -> None: ...
    def poison(self) -> None: ...
    def unlink(self) -> None: ...
    def adopt_ownership(self) -> None: ...
    def release_ownership(self) -> None: ...
    def close(self) -> None: ...
    def view(self, offset: int, num_bytes: int) -> SegmentView: ...
    def populate(self, offset: int, num_bytes: int) -> None: ...
    def load_u64(self, offset: int) -> int: ...
    def store_u64(self, offset: int, value: int) -> None: ...
    def try_lock_slot(self, slot: int) -> bool: ...
    def unlock_slot(self, slot: int) -> None: ...
    def is_slot_locked(self, slot: int) -> bool: ...
    def fileno(self) -> int: ...

class SegmentInfo:
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def problem(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def kind(self) -> int: ...
    @property
    def lifetime(self) -> int: ...
    @property
    def is_sealed(self) -> bool: ...
    @property
    def epoch(self) -> int: ...
    @property
    def layout_version(self) -> int: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def owner_pid(self) -> int: ...
    @property
    def created_unix_nano(self) -> int: ...
    @property
    def is_owner_alive(self) -> bool: ...
    @property
    def is_attached(self) -> bool: ...

class LoadJob:
    @property
    def total_bytes(self) -> int: ...
    @property
    def loaded_bytes(self) -> int: ...
    def wait(self, timeout_ms: int) -> bool: ...
    def cancel(self) -> None: ...

def list_segments(prefix: str) -> list[SegmentInfo]: ...
def reap(prefix: str, release_weights: bool) -> list[str]: ...
def place_pages(segment: Segment, ranges: list[tuple[int, int]], nodes: list[int]) -> None: ...
def nodes_of_pages(segment: Segment, offsets: list[int]) -> list[int]: ...
def start_load(
    segment: Segment, pieces: list[tuple[str, int, int, int]], num_threads: int
) -> LoadJob: ...

class Format(enum.Enum):
    BF16 = ...
    FP8 = ...
    INT4 = ...
    MXFP4 = ...

class ScaleType(enum.Enum):
    NONE = ...
    F32 = ...
    BF16 = ...
    E8M0 = ...

class Mode(enum.Enum):
    DECODE = ...
    PREFILL = ...

class Activation(enum.Enum):
    SILU = ...
    CLAMPED_SWIGLU = ...

def isa() -> str: ...
def supported_isas() -> list[str]: ...
def self_test(isa: str) -> None: ...
def set_exact_activations(are_exact: bool) -> None: ...

class Matrix:
    def __init__(
        self,
        *,
        format: Format,
        scale_type: ScaleType,
        rows: int,
        columns: int,
        group: int,
        data: int,
        row_bytes: int,
        scales: int,
        scale_row_bytes: int,
        zeros: int,
        zero_row_bytes: int,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...

class WorkerPool:
    def __init__(self, num_threads: int, spin_us: int, pin: bool) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def cpus(self) -> list[int]: ...
    def pin_caller(self) -> None: ...

def read_memory(pool: WorkerPool, data: int, num_bytes: int) -> int: ...
def linear(
    pool: WorkerPool,
    isa: str,
    parts: list[tuple[Matrix, int]],
    x: int,
    num_tokens: int,
    mode: Mode,
) -> None: ...

class MoeLayer:
    def __init__(
        self,
        pool: WorkerPool,
        isa: str,
        gate_up: Matrix,
        down: Matrix,
        num_experts: int,
        num_shards: int,
        experts_per_token: int,
        activation: Activation,
        limit: float,
    ) -> None: ...
    @property
    def expert_bytes(self) -> int: ...
    def run(
        self,
        x: int,
        experts: int,
        weights: int,
        output: int,
        num_tokens: int,
        mode: Mode,
    ) -> None: ...

def stored_experts(
    pool: WorkerPool,
    gate_up: Matrix,
    down: Matrix,
    num_experts: int,
    num_shards: int,
    experts_per_token: int,
) -> MoeLayer: ...

class ExpertWorker:
    LAYER_BITS: int
    def __init__(
        self,
        pool: WorkerPool,
        layers: list[MoeLayer],
        lanes: list[tuple[int, int, int, int, int, int, int, int]],
        cache_bytes: int,
    ) -> None: ...
    @property
    def busy_ns(self) -> int: ...
    @property
    def num_answered(self) -> int: ...
    @property
    def fetched_bytes(self) -> int: ...
    @property
    def num_predicted(self) -> int: ...
    @property
    def num_right(self) -> int: ...
    def open(self, lane: int, num_tokens: int) -> None: ...
    def close(self, lane: int) -> None: ...

class FloatMatrix:
    @staticmethod
    def floats(rows: int, columns: int, data: int) -> FloatMatrix: ...
    @staticmethod
    def stored(matrix: Matrix) -> FloatMatrix: ...

class RmsNorm:
    def __init__(self, weight: int, size: int, eps: float) -> None: ...

class Rotary:
    def __init__(
        self, frequencies: list[float], amplitude: float, is_interleaved: bool
    ) -> None: ...

class GqaAttention:
    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        softmax_scale: float,
        q: Matrix,
        k: Matrix,
        v: Matrix,
        o: Matrix,
        q_norm: RmsNorm | None,
        k_norm: RmsNorm | None,
        rotary: Rotary,
    ) -> None: ...

class MlaAttention:
    def __init__(
        self,
        *,
        num_heads: int,
        latent_dim: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        softmax_scale: float,
        q_a: Matrix | None,
        q_a_norm: RmsNorm | None,
        q: Matrix,
        kv_a: Matrix,
        kv_a_norm: RmsNorm,
        kv_b: FloatMatrix,
        o: Matrix,
        rotary: Rotary,
    ) -> None: ...

class Compute:
    def __init__(self, pool: WorkerPool, isa: str, mode: Mode) -> None: ...

class Gate:
    def __init__(
        self,
        *,
        matrix: FloatMatrix,
        bias: int,
        experts_per_token: int,
        num_groups: int,
        groups_per_token: int,
        is_normalized: bool,
        scale: float,
    ) -> None: ...
    def choose(
        self, compute: Compute, x: int, num_tokens: int, experts: int, weights: int
    ) -> None: ...

class FeedForward:
    @staticmethod
    def dense(compute: Compute, gate: Matrix, up: Matrix, down: Matrix) -> FeedForward: ...
    @staticmethod
    def routed(
        compute: Compute,
        gate: Gate,
        gate_up: Matrix,
        down: Matrix,
        num_shards: int,
        shared: tuple[Matrix, Matrix, Matrix] | None,
    ) -> FeedForward: ...

class DecoderLayer:
    def __init__(
        self,
        attention_norm: RmsNorm,
        attention: GqaAttention | MlaAttention,
        ffn_norm: RmsNorm,
        ffn: FeedForward,
    ) -> None: ...

class TokenBatch:
    def __init__(
        self,
        spans: list[tuple[int, int, int, int, int]],
        block_tokens: int,
        num_blocks: int,
    ) -> None: ...

class Decoder:
    def __init__(
        self,
        compute: Compute,
        embedding: Matrix,
        layers: list[DecoderLayer],
        final_norm: RmsNorm,
        head: Matrix,
    ) -> None: ...
    def embed(self, token_ids: int, count: int, out: int) -> None: ...
    def forward(self, batch: TokenBatch, token_ids: int, pages: list[int], hidden: int) -> None: ...
    def forward_layer(self, layer: int, batch: TokenBatch, hidden: int, pages: int) -> None: ...
    def logits(self, hidden: int, count: int, out: int) -> None: ...

def paged_attention(
    *,
    compute: Compute,
    batch: TokenBatch,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_stride: int,
    token_stride: int,
    head_stride: int,
    value_offset: int,
    window: int,
    sinks: int,
    pages: int,
    queries: int,
    outputs: int,
) -> None: ...
def multiply_floats(
    *,
    compute: Compute,
    matrix: FloatMatrix,
    row_begin: int,
    row_end: int,
    is_transposed: bool,
    inputs: int,
    outputs: int,
    num_tokens: int,
) -> None: ...

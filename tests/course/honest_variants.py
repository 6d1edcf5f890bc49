"""Solutions of two tasks, each written three times from docstring and handout alone."""

RING = (
    """
    n = dist.get_world_size(group)
    me = dist.get_rank(group)
    if n == 1:
        return
    flat = tensor.reshape(-1).clone()
    bounds = [flat.numel() * i // n for i in range(n + 1)]

    def piece(i):
        i = i % n
        return flat[bounds[i]:bounds[i + 1]]

    nxt, prev = (me + 1) % n, (me - 1) % n
    for s in range(n - 1):
        out = piece(me - s)
        target = piece(me - s - 1)
        tmp = torch.zeros_like(target)
        exchange(out, tmp, nxt, prev, group)
        target.add_(tmp)
    for s in range(n - 1):
        exchange(piece(me + 1 - s), piece(me - s), nxt, prev, group)
    tensor.copy_(flat.reshape(tensor.shape))


def exchange(out, into, nxt, prev, group):
    ops = []
    if out.numel() > 0:
        ops.append(dist.P2POp(dist.isend, out, group=group, group_peer=nxt))
    if into.numel() > 0:
        ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=prev))
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()
""",
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size < 2:
        return
    numel = tensor.numel()
    chunk = -(-numel // size)
    padded = torch.zeros(chunk * size, dtype=tensor.dtype, device=tensor.device)
    padded[:numel] = tensor.flatten()
    rows = padded.view(size, chunk)
    incoming = torch.empty(chunk, dtype=tensor.dtype, device=tensor.device)
    if chunk == 0:
        return
    left = (rank + size - 1) % size
    right = (rank + 1) % size

    def rotate(index_out, destination):
        requests = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, rows[index_out], group=group, group_peer=right),
            dist.P2POp(dist.irecv, destination, group=group, group_peer=left),
        ])
        [request.wait() for request in requests]

    position = rank
    for _ in range(size - 1):
        rotate(position, incoming)
        position = (position + size - 1) % size
        rows[position] += incoming
    for _ in range(size - 1):
        following = (position + size - 1) % size
        rotate(position, rows[following])
        position = following
    tensor.copy_(padded[:numel].view_as(tensor))
""",
    """
    ring = _Ring(group)
    if ring.world == 1 or tensor.numel() == 0:
        return
    data = tensor.detach().contiguous().view(-1)
    parts = list(torch.chunk(data, ring.world))
    while len(parts) < ring.world:
        parts.append(data[:0])
    phase = 0
    while phase < 2 * (ring.world - 1):
        reducing = phase < ring.world - 1
        source = (ring.rank - phase) % ring.world
        if not reducing:
            source = (ring.rank + 1 - (phase - ring.world + 1)) % ring.world
        sink = (source - 1) % ring.world
        received = ring.shift(parts[source], parts[sink].numel())
        if reducing:
            parts[sink] += received
        else:
            parts[sink].copy_(received)
        phase += 1
    if data.data_ptr() != tensor.data_ptr():
        tensor.copy_(data.view(tensor.size()))


class _Ring:
    def __init__(self, group):
        self.group = group
        self.world = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def neighbour(self, way):
        peer = (self.rank + way) % self.world
        return peer if self.group is None else dist.get_global_rank(self.group, peer)

    def shift(self, send, count):
        result = send.new_empty(count)
        pending = []
        if len(send):
            pending.append(dist.P2POp(dist.isend, send, self.neighbour(1), self.group))
        if count:
            pending.append(dist.P2POp(dist.irecv, result, self.neighbour(-1), self.group))
        handles = dist.batch_isend_irecv(pending) if pending else []
        for handle in handles:
            handle.wait()
        return result
""",
)
BUCKETS = (
    """
    if kinds is None:
        kinds = [None] * len(sizes_bytes)
    result = []
    pending = {}
    filled = {}
    count = {}
    for i in range(len(sizes_bytes)):
        k = kinds[i]
        if k not in pending:
            pending[k] = []
            filled[k] = 0
        pending[k].append(i)
        filled[k] += sizes_bytes[i]
        c = count.get(k, 0)
        cap = caps[c] if c < len(caps) else caps[-1]
        if filled[k] >= cap:
            result.append(pending[k])
            pending[k] = []
            filled[k] = 0
            count[k] = c + 1
    rest = [bucket for bucket in pending.values() if len(bucket) > 0]
    rest.reverse()
    return result + rest
""",
    """
    buckets, still_open = [], {}
    labels = kinds if kinds is not None else ("all",) * len(sizes_bytes)
    for index, label in enumerate(labels):
        bucket = still_open.setdefault(label, _Bucket())
        if bucket.add(index, sizes_bytes[index]) >= caps[min(bucket.number, len(caps) - 1)]:
            buckets.append(bucket.close())
    for bucket in reversed(list(still_open.values())):
        if bucket.tensors:
            buckets.append(bucket.tensors)
    return buckets


class _Bucket:
    def __init__(self):
        self.number = 0
        self.tensors = []
        self.size = 0

    def add(self, index, size):
        self.tensors.append(index)
        self.size += size
        return self.size

    def close(self):
        tensors = self.tensors
        self.tensors, self.size = [], 0
        self.number += 1
        return tensors
""",
    """
    order = {}
    for i, size in enumerate(sizes_bytes):
        kind = kinds[i] if kinds else 0
        order.setdefault(kind, []).append((i, size))
    closed, leftovers = [], []
    for kind, tensors in order.items():
        limits = iter(caps)
        limit = next(limits)
        current, bytes_so_far = [], 0
        for i, size in tensors:
            current = current + [i]
            bytes_so_far = bytes_so_far + size
            if bytes_so_far >= limit:
                closed.append(current)
                current, bytes_so_far = [], 0
                limit = next(limits, limit)
        if current:
            leftovers.insert(0, current)
    closed.sort(key=lambda members: members[-1])
    return closed + leftovers
""",
)

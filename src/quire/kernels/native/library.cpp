// The C interface: divides a call into work units, which threads take one by one, the longest first.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "probe.h"
#include "shared.h"

namespace quire {

#define DECLARE(level) namespace level { extern const Level LEVEL; }
#if defined(__x86_64__)
DECLARE(portable) DECLARE(avx2) DECLARE(avx512) DECLARE(avx512_bf16)
#if defined(QUIRE_HAS_AMX)
DECLARE(amx)
#endif
#elif defined(__ARM_NEON)
DECLARE(neon)
#else
DECLARE(portable)
#endif

static const Level& level_of(int64_t level) {
    switch (level) {
#if defined(__x86_64__)
        case AVX2: return avx2::LEVEL;
        case AVX512: return avx512::LEVEL;
        case AVX512_BF16: return avx512_bf16::LEVEL;
#if defined(QUIRE_HAS_AMX)
        case AMX: return amx::LEVEL;
#endif
        default: return portable::LEVEL;
#elif defined(__ARM_NEON)
        default: return neon::LEVEL;
#else
        default: return portable::LEVEL;
#endif
    }
}

namespace {

// Memory of a thread, reused by later calls: it stays in the CPU caches.
char* thread_memory(size_t bytes) {
    struct Owner {
        char* memory = nullptr;
        size_t size = 0;
        ~Owner() { std::free(memory); }
    };
    static thread_local Owner owner;
    if (owner.size < bytes) {
        std::free(owner.memory);
        owner.size = 0;
        owner.memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 4095) / 4096 * 4096));
        if (!owner.memory) throw std::bad_alloc();
        owner.size = bytes;
    }
    return owner.memory;
}

// A pool of threads, for processes without an OpenMP runtime.
class Pool {
  public:
    // Runs f on the caller's thread and on up to `threads - 1` others, and waits until all of them have returned.
    void run(int64_t threads, void (*f)(void*), void* of) {
        std::unique_lock<std::mutex> lock(mutex);
        if (job) {  // another thread uses the pool: run on the caller's thread alone
            lock.unlock();
            return f(of);
        }
        for (; count < threads - 1; count++) std::thread([this] { wait_for_work(); }).detach();
        job = f, argument = of, open_slots = threads - 1;
        lock.unlock();
        wake.notify_all();
        f(of);
        lock.lock();
        open_slots = 0;
        done.wait(lock, [this] { return busy == 0; });
        job = nullptr;
    }

    // The pool of this process: a child of fork has none of its parent's threads and makes a new pool.
    static Pool& own() {
        static std::mutex guard;
        static Pool* pool = nullptr;
        static pid_t process = 0;
        std::lock_guard<std::mutex> lock(guard);
        if (!pool || process != getpid()) pool = new Pool, process = getpid();  // never deleted: its threads run until the process ends
        return *pool;
    }

  private:
    void wait_for_work() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [this] { return open_slots > 0; });
            open_slots--, busy++;
            auto f = job;
            auto of = argument;
            lock.unlock();
            f(of);
            lock.lock();
            if (--busy == 0) done.notify_one();
        }
    }

    std::mutex mutex;
    std::condition_variable wake, done;
    void (*job)(void*) = nullptr;
    void* argument = nullptr;
    int64_t count = 0, open_slots = 0, busy = 0;
};

// Runs f on `threads` threads, the caller's among them: on torch's own threads, through the OpenMP runtime that torch has loaded.
// Its threads spin for a while after each of torch's operators and would compete with others for the cores: after a matrix product,
// a decode of 0.85 ms takes 1.6 ms on a separate pool, and 1.9 ms on newly started threads.
template <class F>
void run_parallel(int64_t threads, F& f) {
    using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
    static const Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    auto call = [](void* x) { (*static_cast<F*>(x))(); };
    if (threads <= 1) f();
    else if (parallel) parallel(call, &f, static_cast<unsigned>(threads), 0);
    else Pool::own().run(threads, call, &f);
}

// Calls each(0) to each(count - 1) on several threads, which take the next index when they are free.
template <class Each>
void parallel_for(int64_t threads, int64_t count, size_t workspace, Each each) {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    auto work = [&] {
        try {
            char* mine = workspace ? thread_memory(workspace) : nullptr;
            for (int64_t i; (i = next.fetch_add(1)) < count;) each(i, mine);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
    };
    run_parallel(std::min(threads, count), work);
    if (failed) throw std::bad_alloc();
}

// The keys that some of the new tokens [first, first + count) of a sequence can see.
Range sees(const Attend& call, int64_t seq, int64_t first, int64_t count) {
    const Lengths& sequence = call.lengths[seq];
    const Shard& shard = call.batch.shard;
    int64_t context = sequence.kv_len - sequence.q_len;
    if (call.spans.data) {
        Range seen{INT64_MAX, 0};
        for (int64_t t = first; t < first + count; t++) {
            Range one = span_of(call.spans, sequence.begin + t, sequence.kv_len);
            if (one.low < one.high) seen = {std::min(seen.low, one.low), std::max(seen.high, one.high)};
        }
        return seen.low < seen.high ? Range{shard.count(seen.low), shard.count(seen.high)} : Range{0, 0};
    }
    if (call.mask) {
        int64_t low = call.positions.data ? std::max<int64_t>(0, context) : 0;
        for (int64_t t = first; call.positions.data && t < first + count; t++) {
            Range seen = context_seen(call, call.positions.at(sequence.begin + t), context);
            if (seen.low < seen.high) low = std::min(low, seen.low);
        }
        return {shard.count(low), shard.count(std::max(low, sequence.kv_len))};
    }
    int64_t right = call.is_causal(seq) ? 0 : call.right;
    int64_t low = call.left == UNBOUNDED ? 0 : std::max<int64_t>(0, context + first - call.left);
    int64_t high = right == UNBOUNDED ? sequence.kv_len : std::max<int64_t>(0, std::min(sequence.kv_len, context + first + count + right));
    return {shard.count(low), shard.count(std::max(low, high))};
}

// The lengths of all sequences, read once. `sound`: whether q_starts assigns the rows of q to sequences.
std::vector<Lengths> lengths_of(const Attend& call, bool& sound) {
    std::vector<Lengths> lengths(static_cast<size_t>(call.batch.seqs));
    int64_t begin = call.batch.q_starts.at(0);
    sound = begin == 0;
    for (int64_t seq = 0; seq < call.batch.seqs; seq++) {
        int64_t end = call.batch.q_starts.at(seq + 1);
        if (end < begin || end > call.tokens) sound = false;
        if (!sound) break;
        lengths[seq] = {begin, end - begin, call.batch.kv_lens.at(seq)};
        begin = end;
    }
    return lengths;
}

// Whether a query of a tree sees key `capacity` of the context or one after it, for which the table has no column.
bool sees_from(const Attend& call, const Lengths& sequence, int64_t context, int64_t capacity) {
    if (!call.positions.data) return true;
    for (int64_t t = sequence.begin; t < sequence.begin + sequence.q_len; t++) {
        Range seen = context_seen(call, call.positions.at(t), context);
        if (seen.low < seen.high && std::max(call.batch.shard.count(seen.low), capacity) < call.batch.shard.count(seen.high)) return true;
    }
    return false;
}

// Whether a page does not exist that some span needs. Also finds out whether the spans leave gaps.
bool misses_span(const Attend& call, Lengths& sequence, int64_t seq, int64_t end) {
    const Shard& shard = call.batch.shard;
    int64_t last = sequence.begin + sequence.q_len;
    sequence.has_gaps = seen_by_spans(call.spans, sequence.begin, last, sequence.kv_len, sequence.kv_len).size() > 1;
    for (const Range& range : seen_by_spans(call.spans, sequence.begin, last, sequence.kv_len, end)) {
        int64_t low = shard.count(range.low), high = shard.count(range.high);
        if (low < high && !pages_exist(call.batch, seq, low, high, call.cache.page_size, call.cache.pages)) return true;
    }
    return false;
}

// Whether a sequence cannot be computed: its length is invalid, or a required page does not exist. With a tree mask, pages are
// checked key by key when they are read: only some of them may be required.
bool is_invalid(const Attend& call, Lengths& sequence, int64_t seq) {
    if (sequence.kv_len < 0 || sequence.kv_len > FAR_AWAY || (call.mask && sequence.q_len > call.mask_width)) return true;
    int64_t context = sequence.kv_len - sequence.q_len, end = call.takes_new(seq) ? std::max<int64_t>(0, context) : sequence.kv_len;
    int64_t columns = call.batch.width, size = call.cache.page_size;
    const Shard& shard = call.batch.shard;
    if (call.select.kind) return false;  // its entries are checked when they are read
    if (call.spans.data) return misses_span(call, sequence, seq, end);
    if (call.mask) return shard.count(context) > columns * size && sees_from(call, sequence, context, columns * size);
    int64_t low = shard.count(call.left == UNBOUNDED ? 0 : std::max<int64_t>(0, context - call.left));
    end = shard.count(end);
    return low < end && !pages_exist(call.batch, seq, low, end, size, call.cache.pages);
}

// The units of a sequence with a selection. Rows that share entries are in one unit: all rows of a sequence, or those of a token, and
// all heads or one.
void add_selected_units(const Attend& call, const Level& level, int64_t seq, int64_t height, std::vector<Unit>& units) {
    const int64_t heads = call.cache.heads, rows = call.lengths[seq].q_len * call.group;
    const int64_t keys = call.select.count * call.select.keys_per_entry(call.cache.page_size);
    // A batch-invariant call takes one token at a time: otherwise keys that other tokens see would move those of this one.
    const bool by_token = call.select.kind == Select::POSITIONS || call.invariant;
    const int64_t most = by_token ? std::min(call.group, level.most_rows(call)) : level.uses_decode(call, rows) ? rows : height;
    const int64_t together = call.select.head == 0 && level.uses_decode(call, std::min(most, rows)) ? heads : 1;
    for (int64_t head = 0; head < heads; head += together) {
        for (int64_t row = 0, count; row < rows; row += count) {
            count = std::min(most, by_token ? call.group - row % call.group : rows - row);
            double cost = double(keys + 16) * together * (count + (level.uses_decode(call, count) ? 8 : 16));
            units.push_back({seq, head, together, row, count, 0, keys, nullptr, cost, count, nullptr, 0});
        }
    }
}

void fill_nan(const Attend& call, int64_t first, int64_t count) {
    int64_t heads = call.cache.heads * call.group, size = size_of(call.out.type);
    const uint64_t nan = NANS[call.out.type];
    for (int64_t token = first; token < first + count; token++) {
        for (int64_t head = 0; head < heads; head++) {
            if (call.lse) call.lse[token * call.lse_token + head * call.lse_head] = __builtin_nanf("");
            for (int64_t d = 0; d < call.cache.v.dim; d++) {
                std::memcpy(call.out.data + (token * call.out.token + head * call.out.head + d * call.out.dim) * size, &nan, size);
            }
        }
    }
}

void fill_zero(const Attend& call, int64_t first) {
    int64_t heads = call.cache.heads * call.group, size = size_of(call.out.type);
    for (int64_t token = first; token < call.tokens; token++) {
        for (int64_t head = 0; head < heads; head++) {
            if (call.lse) call.lse[token * call.lse_token + head * call.lse_head] = 0;
            if (!call.zero_padding) continue;
            for (int64_t d = 0; d < call.cache.v.dim; d++) {
                uint8_t* to = call.out.data + (token * call.out.token + head * call.out.head + d * call.out.dim) * size;
                std::fill(to, to + size, 0);
            }
        }
    }
}

// Cuts units that are larger than a thread's share of the work over their keys. Their partial results are combined, and those of a
// sequence that shares a prefix.
class Cutter {
  public:
    std::vector<Unit> units;
    std::vector<SplitUnit> split_units;

    Cutter(const Attend& call, const Level& level, SharedPlan& plan, double part_cost)
        : call(call), level(level), plan(plan), part_cost(part_cost) {}

    void cut(const std::vector<Unit>& given) {
        for (const Unit& unit : given) {
            if (unit.shared) plan.prefixes[unit.prefix].chunks = std::max(plan.prefixes[unit.prefix].chunks, parts_of(unit));
        }
        for (SharedPrefix& prefix : plan.prefixes) {
            prefix.place = take(prefix.chunks * call.cache.heads * static_cast<int64_t>(prefix.tokens.size()) * call.group);
        }
        for (const Unit& unit : given) {
            if (unit.shared) add_shared(unit);
            else add_own(unit);
        }
        memory.reset(bytes ? new float[bytes / sizeof(float)] : nullptr);
        for (Unit& unit : units) {
            if (unit.part) unit.part = memory.get() + (reinterpret_cast<uintptr_t>(unit.part) - 64) / sizeof(float);
        }
        for (Unit& unit : units) {
            if (call.invariant) go_on(unit);
        }
        for (Part& part : parts) part.at = memory.get() + reinterpret_cast<uintptr_t>(part.at) / sizeof(float);
        for (size_t i = 0; i < split_units.size(); i++) split_units[i].parts = parts.data() + first_parts[i];
    }

  private:
    const Attend& call;
    const Level& level;
    SharedPlan& plan;
    double part_cost;
    std::vector<Part> parts;
    std::vector<size_t> first_parts;  // of each split unit
    std::vector<std::vector<const float*>> befores;
    std::unique_ptr<float[]> memory;
    size_t bytes = 0;

    int64_t tiles_of(const Unit& unit) const { return (unit.high + level.keys - 1) / level.keys - unit.low / level.keys; }

    int64_t parts_of(const Unit& unit) const {
        if (call.threads < 2 || call.invariant || unit.cost <= part_cost) return 1;
        return std::max<int64_t>(1, std::min<int64_t>(static_cast<int64_t>(unit.cost / part_cost + 0.999), tiles_of(unit) / 4));
    }

    // Memory for partial results of some rows, as an offset in bytes until it is allocated.
    size_t take(int64_t rows) {
        size_t place = bytes;
        bytes += static_cast<size_t>(rows * part_stride(call)) * sizeof(float);
        return place;
    }

    // A part of a unit that is cut over its keys; its partial result goes to `place`.
    void add_part(const Unit& unit, int64_t nth, int64_t count, size_t place) {
        Unit part = unit;
        const int64_t base = unit.low / level.keys, tiles = tiles_of(unit);
        part.low = nth == 0 ? unit.low : (base + tiles * nth / count) * level.keys;
        part.high = nth == count - 1 ? unit.high : (base + tiles * (nth + 1) / count) * level.keys;
        part.cost = unit.cost / double(count);
        part.part = reinterpret_cast<float*>(place + 64);  // never null
        units.push_back(part);
    }

    void add_shared(const Unit& unit) {
        const SharedPrefix& prefix = plan.prefixes[unit.prefix];
        for (int64_t c = 0; c < prefix.chunks; c++) {
            add_part(unit, c, prefix.chunks, place_of(prefix, c, unit.head, unit.row));
        }
    }

    void add_own(const Unit& unit) {
        const int64_t count = parts_of(unit);
        const bool shares = !call.select.kind && plan.shares(unit.seq);
        if (call.invariant || (count < 2 && !shares)) {
            units.push_back(unit);
            return;
        }
        const size_t first = parts.size();
        for (size_t i = 0; shares && i < plan.places[unit.seq].size(); i++) {
            const SharedPlace& at = plan.places[unit.seq][i];
            const SharedPrefix& prefix = plan.prefixes[at.prefix];
            const int64_t rows = static_cast<int64_t>(prefix.tokens.size()) * call.group;
            for (int64_t c = 0; c < prefix.chunks; c++) {
                const size_t place = place_of(prefix, c, unit.head, at.token * call.group + unit.row);
                parts.push_back({reinterpret_cast<const float*>(place), rows * part_stride(call)});
            }
        }
        for (int64_t p = 0; p < count; p++) {
            const size_t place = take(unit.heads * unit.rows);
            parts.push_back({reinterpret_cast<const float*>(place), unit.rows * part_stride(call)});
            add_part(unit, p, count, place);
        }
        first_parts.push_back(first);
        split_units.push_back(
            {unit.seq, unit.head, unit.heads, unit.row, unit.rows, nullptr, static_cast<int64_t>(parts.size() - first)});
    }

    // Finds the partial results of the prefixes before a unit.
    void go_on(Unit& unit) {
        if (call.select.kind || (!unit.shared && !plan.shares(unit.seq))) return;
        if (!unit.shared && plan.places[unit.seq].empty()) return;
        const int64_t tokens = (unit.row + unit.rows - 1) / call.group + 1;
        std::vector<const float*> found(static_cast<size_t>(tokens), nullptr);
        for (int64_t t = 0; t < tokens; t++) {
            SharedPlace at = unit.shared ? plan.prefixes[unit.prefix].before[t] : plan.places[unit.seq].back();
            if (at.prefix < 0) return;
            const SharedPrefix& prefix = plan.prefixes[at.prefix];
            const int64_t token = unit.shared ? at.token : at.token + t;
            found[t] = memory.get() + place_of(prefix, 0, unit.head, token * call.group) / sizeof(float);
        }
        befores.push_back(std::move(found));
        unit.before = befores.back().data();
    }

    size_t place_of(const SharedPrefix& prefix, int64_t chunk, int64_t head, int64_t row) const {
        const int64_t rows = static_cast<int64_t>(prefix.tokens.size()) * call.group;
        return prefix.place + static_cast<size_t>(((chunk * call.cache.heads + head) * rows + row) * part_stride(call)) * sizeof(float);
    }
};

void run(Attend& call) {
    const Level& level = level_of(call.level);
    bool sound;
    std::vector<Lengths> lengths = lengths_of(call, sound);
    if (!sound) return fill_nan(call, 0, call.tokens);  // q_starts does not say which rows belong to which sequence
    call.lengths = lengths.data();
    fill_zero(call, call.batch.seqs ? lengths.back().begin + lengths.back().q_len : 0);
    for (int64_t seq = 0; seq < call.batch.seqs; seq++) {
        Lengths& sequence = lengths[seq];
        int64_t q_len = sequence.q_len;
        if (q_len <= 0 || q_len < call.only_low || q_len > call.only_high || !is_invalid(call, sequence, seq)) continue;
        fill_nan(call, sequence.begin, q_len);
        sequence.q_len = 0;
    }
    SharedPlan plan(call, level, lengths, [&](int64_t seq) {
        fill_nan(call, lengths[seq].begin, lengths[seq].q_len);
        lengths[seq].q_len = 0;
    });
    auto decodes = [&](int64_t seq) { return !lengths[seq].has_gaps && level.uses_decode(call, lengths[seq].q_len * call.group); };
    std::vector<Unit> units;
    double total = 0;
    int64_t heads = call.cache.heads, tallest = level.most_rows(call), work_rows = 0;
    for (int64_t seq = 0; seq < call.batch.seqs; seq++) {
        int64_t q_len = lengths[seq].q_len, rows = q_len * call.group;
        if (q_len > 0 && !decodes(seq)) work_rows += rows * heads;
    }
    // Rows are divided into enough pieces for all threads, but not into very small ones, since each piece packs the keys again.
    int64_t height = std::max<int64_t>(32, std::min(tallest, work_rows / (4 * call.threads)));
    for (int64_t seq = 0; seq < call.batch.seqs; seq++) {
        int64_t q_len = lengths[seq].q_len, rows = q_len * call.group;
        if (q_len <= 0 || q_len < call.only_low || q_len > call.only_high) continue;
        if (call.select.kind) {
            add_selected_units(call, level, seq, height, units);
            continue;
        }
        if (decodes(seq)) {
            Range keys = sees(call, seq, 0, q_len);
            keys.low = std::max(keys.low, plan.begin_of(seq));
            double cost = double(keys.high - keys.low + 16) * heads * (rows + 8);
            units.push_back({seq, 0, heads, 0, rows, keys.low, keys.high, nullptr, cost, rows, nullptr, 0});
            total += cost;
            continue;
        }
        int64_t pieces = (rows + height - 1) / height, step = (rows + pieces - 1) / pieces;
        step = (step + level.strip - 1) / level.strip * level.strip;
        for (int64_t head = 0; head < heads; head++) {
            for (int64_t row = 0; row < rows; row += step) {
                int64_t count = std::min(step, rows - row), first = row / call.group, last = (row + count - 1) / call.group;
                Range keys = sees(call, seq, first, last - first + 1);
                keys.low = std::max(keys.low, plan.begin_of(seq));
                double cost = double(keys.high - keys.low + 16) * (count + 16);
                units.push_back({seq, head, 1, row, count, keys.low, keys.high, nullptr, cost, count, nullptr, 0});
                total += cost;
            }
        }
    }

    for (const Unit& unit : units) total += call.select.kind ? unit.cost : 0;
    const size_t own_units = units.size();
    add_shared_units(call, level, plan, units);
    for (size_t i = own_units; i < units.size(); i++) total += units[i].cost;

    Cutter cutter(call, level, plan, total / (4.0 * call.threads));
    cutter.cut(units);
    const std::vector<Unit>& cut = cutter.units;
    const std::vector<SplitUnit>& split_units = cutter.split_units;

    std::vector<int64_t> order(cut.size());
    for (size_t i = 0; i < order.size(); i++) order[i] = static_cast<int64_t>(i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return cut[a].cost > cut[b].cost; });
    // Starting threads takes microseconds: smaller calls run on one thread.
    int64_t threads = total * (call.cache.k.dim + call.cache.v.dim) < 1e6 ? 1 : call.threads;
    // Units that go on from the results of others are computed after these: in a batch-invariant call, prefix after prefix.
    auto phase_of = [&](int64_t i) {
        const Unit& unit = cut[i];
        if (!call.invariant || plan.prefixes.empty()) return INT64_C(0);
        return unit.shared ? plan.prefixes[unit.prefix].depth : INT64_MAX;
    };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return phase_of(a) < phase_of(b); });
    for (size_t begin = 0, end; begin < order.size(); begin = end) {
        for (end = begin + 1; end < order.size() && phase_of(order[end]) == phase_of(order[begin]);) end++;
        parallel_for(threads, static_cast<int64_t>(end - begin), level.workspace_size(call), [&](int64_t i, char* mine) {
            const Unit& unit = cut[order[begin + static_cast<size_t>(i)]];
            const bool few = call.select.kind || unit.shared ? level.uses_decode(call, unit.rows) : decodes(unit.seq);
            level.attend(call, unit, few, mine);
        });
    }
    parallel_for(threads, static_cast<int64_t>(split_units.size()), 0, [&](int64_t i, char*) { level.combine(call, split_units[i]); });
}

// The slot of a token, or -1 if it is not stored.
int64_t slot_of(const Write& call, int64_t token, int64_t seq, int64_t end, int64_t kv_len) {
    if (call.slots.data) return call.slots.at(token);
    if (kv_len < 0 || kv_len > FAR_AWAY) return -1;
    int64_t at = token - end + kv_len;
    if (at < 0 || !call.batch.shard.owns(at)) return -1;
    at = call.batch.shard.count(at);  // its number among the keys of the shard
    if (at / call.cache.page_size >= call.batch.width) return -1;
    int64_t page = call.batch.table.at(seq, at / call.cache.page_size);
    return page < 0 || page >= call.cache.pages ? -1 : page * call.cache.page_size + at % call.cache.page_size;
}

// Calls each(token, sequence, its end, its kv_len) for every token of a sequence.
template <class Each>
void for_tokens(const Write& call, int64_t live, Each each) {
    for (int64_t seq = 0, token = 0; seq < call.batch.seqs; seq++) {
        int64_t end = call.batch.q_starts.at(seq + 1), kv_len = call.batch.kv_lens.at(seq);
        for (; token < std::min(live, end); token++) each(token, seq, end, kv_len);
    }
}

int64_t live_tokens(const Write& call) {
    return std::max<int64_t>(0, std::min(call.tokens, call.batch.q_starts.at(call.batch.seqs)));
}

void run(const Write& call) {
    const Level& level = level_of(call.level);
    int64_t live = live_tokens(call);
    std::vector<int64_t> slots(live, -1);
    for_tokens(call, live, [&](int64_t token, int64_t seq, int64_t end, int64_t kv_len) { slots[token] = slot_of(call, token, seq, end, kv_len); });
    const int64_t capacity = call.cache.pages * call.cache.page_size, some = 16;
    int64_t pieces = (live + some - 1) / some;
    parallel_for(pieces < 4 ? 1 : call.threads, pieces, level.write_workspace(call), [&](int64_t i, char* mine) {
        for (int64_t token = i * some; token < std::min(live, (i + 1) * some); token++) {
            if (slots[token] >= 0 && slots[token] < capacity) level.write(call, token, slots[token], mine);
        }
    });
}

void fill_zero(const Rope& rope, int64_t token, int64_t dim) {
    int64_t size = size_of(rope.out.type);
    for (int64_t head = 0; head < rope.q_heads; head++) {
        for (int64_t d = 0; d < dim; d++) {
            std::memset(rope.out.data + (token * rope.out.token + head * rope.out.head + d * rope.out.dim) * size, 0, size);
        }
    }
}

void run(const RopeWrite& call) {
    const Write& write = call.write;
    const Level& level = level_of(write.level);
    int64_t live = live_tokens(write);
    std::vector<int64_t> slots(live, -1), positions(live, -1);
    for_tokens(write, live, [&](int64_t token, int64_t seq, int64_t end, int64_t kv_len) {
        slots[token] = slot_of(write, token, seq, end, kv_len);
        if (kv_len >= 0 && kv_len <= FAR_AWAY) positions[token] = token - end + kv_len;
    });
    const int64_t capacity = write.cache.pages * write.cache.page_size, some = 4;
    int64_t rows = call.rope.zero_padding ? write.tokens : live, pieces = (rows + some - 1) / some;
    parallel_for(pieces < 4 ? 1 : write.threads, pieces, level.rope_workspace(call), [&](int64_t i, char* mine) {
        for (int64_t token = i * some; token < std::min(rows, (i + 1) * some); token++) {
            if (token >= live) fill_zero(call.rope, token, call.head_dim());
            else level.rope_write(call, token, slots[token] < capacity ? slots[token] : -1, positions[token], mine);
        }
    });
}

template <class Do>
int guarded(Do f) {
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

constexpr size_t GIVEN = offsetof(Attend, lengths);  // bytes of the caller's structure

}  // namespace
}  // namespace quire

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT unsigned quire_levels() { return quire::available_levels(); }
EXPORT const char* quire_level_name(int level) { return level >= 0 && level < quire::LEVELS ? quire::LEVEL_NAMES[level] : nullptr; }
EXPORT size_t quire_size_of_attend() { return quire::GIVEN; }
EXPORT size_t quire_size_of_write() { return sizeof(quire::Write); }
EXPORT size_t quire_size_of_rope_write() { return sizeof(quire::RopeWrite); }
EXPORT size_t quire_size_of_check() { return sizeof(quire::Check); }

// Returns 0, or -1 if memory could not be allocated.
EXPORT int quire_attend(const void* given) {
    return quire::guarded([&] {
        quire::Attend call;
        std::memcpy(&call, given, quire::GIVEN);
        quire::run(call);
        return 0;
    });
}
EXPORT int quire_write(const void* given) {
    return quire::guarded([&] {
        quire::Write call;
        std::memcpy(&call, given, sizeof call);
        quire::run(call);
        return 0;
    });
}

EXPORT int quire_rope_write(const void* given) {
    return quire::guarded([&] {
        quire::RopeWrite call;
        std::memcpy(&call, given, sizeof call);
        quire::run(call);
        return 0;
    });
}

// Returns 1 if the index values and scales of a call are certainly legal, 0 if not, -1 if memory could not be allocated.
EXPORT int quire_check(const void* given) {
    return quire::guarded([&] {
        quire::Check call;
        std::memcpy(&call, given, sizeof call);
        return quire::is_legal(call) ? 1 : 0;
    });
}

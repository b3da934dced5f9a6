// A pretend CUDA device for torch's CPU build (README.md). Kernels run on the host, at once; streams are vector clocks.
//
// A stream's clock counts its launches. An access (stream, count) comes before what a stream does now if the stream's
// clock has reached that count: by an event, by a host wait, or in the stream itself. Any other pair of accesses to the
// same bytes, one of them a write, is a race. The host has a clock too; each launch joins it to its stream's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <random>
#include <set>

namespace {
using namespace at;
using c10::Stream;
using c10::StreamId;
using Clock = std::vector<uint64_t>;
using Address = uintptr_t;
constexpr int MOST_DEVICES = 8;

struct Access {
  Address low, high; int stream; uint64_t count;
  bool writes; std::string op;
};

struct Block {  // memory of the device, or pinned memory of the host
  Address start; size_t size;
  int device, stream; bool pinned;
  std::set<int> recorded;
  std::vector<Access> accesses;
};

struct Copy {  // an asynchronous one, which the host has not waited for
  int stream; uint64_t count;
  Address start; std::vector<char> bytes;
  bool to_host; std::string op;
};

struct Memory { size_t allocated = 0, peak = 0, reserved = 0; };

struct State {
  std::recursive_mutex mutex;
  std::map<Address, Block> blocks;
  std::map<std::tuple<int, int, size_t>, std::vector<Address>> pool;  // freed blocks by device, stream and size
  std::vector<Clock> clocks = std::vector<Clock>(MOST_DEVICES);       // the default streams come first
  Clock host;
  std::vector<Copy> copies;
  int devices = 1;
  size_t total = size_t(8) << 30;
  Memory memory[MOST_DEVICES];
  std::set<int> contexts;
  std::string query = "coin";
  std::mt19937 coin{1};
  std::map<std::string, std::pair<std::string, std::string>> failures;  // op: kind of error, message
  std::set<std::string> nondeterministic;
  std::map<std::string, int> launches;
  PyObject* listener = nullptr;
};
State& state = *new State;  // never destroyed: threads outlive static objects

thread_local int current_device = 0;
thread_local std::map<int, StreamId> current_streams;
thread_local int depth = 0;
thread_local std::vector<std::string> unsaid;

// A lock on the state. Messages go to Python after its release, since a thread that holds the interpreter may wait for it.
struct Lock {
  Lock() {
    state.mutex.lock();
    depth++;
  }
  ~Lock() {
    std::vector<std::string> messages;
    if (--depth == 0) messages.swap(unsaid);
    state.mutex.unlock();
    if (messages.empty() || !state.listener) return;
    pybind11::gil_scoped_acquire interpreter;
    for (auto& message : messages) {
      PyObject* answer = PyObject_CallFunction(state.listener, "s", message.c_str());
      if (!answer) PyErr_WriteUnraisable(state.listener);
      Py_XDECREF(answer);
    }
  }
};
void say(const std::string& message) { unsaid.push_back(message); }

// ---- streams and clocks
int clock_of(int device, StreamId id) { return id ? int(id) : device; }
StreamId stream_of(int device) {
  return current_streams[device];  // 0, the default stream, where none was set
}
int clock_on(int device) { return clock_of(device, stream_of(device)); }

uint64_t count_in(const Clock& clock, size_t stream) { return stream < clock.size() ? clock[stream] : 0; }
void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}
bool reached(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); i++)
    if (count_in(clock, i) < other[i]) return false;
  return true;
}

uint64_t launch(int stream) {
  auto& clock = state.clocks[stream];
  join(clock, state.host);
  if (int(clock.size()) <= stream) clock.resize(stream + 1);
  return ++clock[stream];
}

// ---- asynchronous copies: bytes on the host are 0xCD, or must stay as they are, until the host has waited
void settle(Copy& copy) {
  if (copy.to_host)
    memcpy((void*)copy.start, copy.bytes.data(), copy.bytes.size());
  else if (memcmp((void*)copy.start, copy.bytes.data(), copy.bytes.size()))
    say("race: the host wrote pinned memory that a copy may still read: " + copy.op);
}
template <class Choice>
void settle_where(Choice chosen) {
  std::vector<Copy> left;
  for (auto& copy : state.copies)
    if (chosen(copy))
      settle(copy);
    else
      left.push_back(std::move(copy));
  state.copies.swap(left);
}
void host_waits_for(const Clock& clock) {
  join(state.host, clock);
  settle_where([](const Copy& copy) { return count_in(state.host, copy.stream) >= copy.count; });
}
bool meets(const Copy& copy, Address start, size_t size) {
  return copy.start < start + size && start < copy.start + copy.bytes.size();
}

// ---- accesses
Block* block_at(Address address) {
  auto after = state.blocks.upper_bound(address);
  if (after == state.blocks.begin()) return nullptr;
  Block& block = std::prev(after)->second;
  return address < block.start + block.size ? &block : nullptr;
}
bool is_pinned(Address address) {
  Block* block = block_at(address);
  return block && block->pinned;
}

void access(int stream, Address low, size_t size, bool writes, const std::string& op, uint64_t count) {
  Block* block = size ? block_at(low) : nullptr;
  if (!block) return;
  Address high = low + size;
  auto& clock = state.clocks[stream];
  std::vector<Access> left;
  for (auto& other : block->accesses) {
    bool before = other.stream == stream || count_in(clock, other.stream) >= other.count;
    if (other.low < high && low < other.high && (other.writes || writes) && !before)
      say("race: " + op + (writes ? " writes" : " reads") + " on stream " + std::to_string(stream) + " what " +
          other.op + (other.writes ? " writes" : " reads") + " on stream " + std::to_string(other.stream) +
          (block->pinned ? " (pinned)" : ""));
    bool replaced = before && other.low >= low && other.high <= high && (writes || !other.writes);
    if (!replaced) left.push_back(other);
  }
  left.push_back({low, high, stream, count, writes, op});
  block->accesses.swap(left);
}

// ---- memory
void fail_if_told(const std::string& op) {
  auto failure = state.failures.find(op);
  if (failure == state.failures.end()) return;
  auto [kind, message] = failure->second;
  state.failures.erase(failure);
  TORCH_CHECK_WITH(OutOfMemoryError, kind != "OutOfMemoryError", message);
  if (kind == "AcceleratorError") throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, 2, message);
  TORCH_CHECK(false, message);
}

struct Copying : c10::Allocator {
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

struct DeviceMemory final : Copying {
  DataPtr allocate(size_t size) override {
    Lock lock;
    int device = current_device, stream = clock_on(device);
    Memory& memory = state.memory[device];
    state.contexts.insert(device);
    if (!size) return {nullptr, nullptr, &release, Device(kCUDA, device)};
    fail_if_told("allocate");
    size = (size + 511) / 512 * 512;
    TORCH_CHECK_WITH(OutOfMemoryError, memory.allocated + size <= state.total, "CUDA out of memory. Tried to allocate ",
                     size / 1048576.0, " MiB. GPU ", device, " has a total capacity of ", state.total / 1048576.0, " MiB.");
    auto& freed = state.pool[{device, stream, size}];
    Address start;
    if (freed.empty()) {
      start = (Address)aligned_alloc(512, size);
      memory.reserved += size;
      state.blocks[start] = {start, size, device, stream, false, {}, {}};
    } else {
      start = freed.back();
      freed.pop_back();
      state.blocks[start].recorded.clear();
    }
    memset((void*)start, 0xFF, size);  // NaN
    memory.allocated += size;
    memory.peak = std::max(memory.peak, memory.allocated);
    return {(void*)start, (void*)start, &release, Device(kCUDA, device)};
  }
  static void release(void* pointer) {
    if (!pointer) return;
    Lock lock;
    Block& block = state.blocks[(Address)pointer];
    state.memory[block.device].allocated -= block.size;
    // Its memory is used again after the recorded streams' work up to now: torch's allocator waits for them.
    std::vector<Access> left;
    for (auto& done : block.accesses)
      if (!block.recorded.count(done.stream)) left.push_back(done);
    block.accesses.swap(left);
    state.pool[{block.device, block.stream, block.size}].push_back(block.start);
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
};

struct PinnedMemory final : Copying {
  DataPtr allocate(size_t size) override {
    Lock lock;
    state.contexts.insert(current_device);
    fail_if_told("pin");
    size = std::max<size_t>(64, (size + 63) / 64 * 64);
    Address start = (Address)aligned_alloc(64, size);
    state.blocks[start] = {start, size, -1, 0, true, {}, {}};
    return {(void*)start, (void*)start, &release, Device(kCPU)};
  }
  static void release(void* pointer) {
    Lock lock;
    Address start = (Address)pointer;
    size_t size = state.blocks[start].size;
    settle_where([&](const Copy& copy) { return meets(copy, start, size); });
    state.blocks.erase(start);
    free(pointer);
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
};
DeviceMemory& device_memory = *new DeviceMemory;
PinnedMemory& pinned_memory = *new PinnedMemory;

// ---- what torch asks a device for
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(Device device) { return device.has_index() ? device.index() : current_device; }
  static Stream stream(int device, StreamId id) { return Stream(Stream::UNSAFE, Device(kCUDA, device), id); }
  static int clock(const Stream& stream) { return clock_of(stream.device_index(), stream.id()); }

  DeviceType type() const override { return kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return state.devices; }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    current_device = device.index();
    return before;
  }
  Stream getStream(Device device) const override { return stream(index(device), stream_of(index(device))); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    Lock lock;
    state.clocks.emplace_back();
    return stream(index(device), state.clocks.size() - 1);
  }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return (void*)stream.id(); }
  bool queryStream(const Stream& stream) const override { Lock lock; return answer(state.clocks[clock(stream)]); }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock;
    say("wait: stream");
    host_waits_for(Clock(state.clocks[clock(stream)]));
  }
  void synchronizeDevice(const DeviceIndex) const override {
    Lock lock;
    say("wait: device");
    for (auto& clock : std::vector<Clock>(state.clocks)) host_waits_for(clock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Lock lock;
    if (Block* block = block_at((Address)data.get())) block->recorded.insert(clock(stream));
  }

  // An event is the clock of a stream at some moment.
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new Clock;
    auto& now = state.clocks[clock(stream)];
    join(now, state.host);
    *(Clock*)*event = now;
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock;
    if (event) join(state.clocks[clock(stream)], *(Clock*)event);
  }
  bool queryEvent(void* event) const override { Lock lock; return !event || answer(*(Clock*)event); }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    say("wait: event");
    if (event) host_waits_for(*(Clock*)event);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Clock*)event; }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1e-3; }

  static bool answer(const Clock& clock) {
    if (reached(state.host, clock)) return true;
    bool yes = state.query == "always" || (state.query == "coin" && (state.coin() & 1));
    if (yes) host_waits_for(Clock(clock));
    return yes;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace

namespace at {
struct PretendHooks : CUDAHooksInterface {
  PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; } bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return state.devices; }
  DeviceIndex deviceCount() const override { return state.devices; }
  bool hasPrimaryContext(DeviceIndex device) const override { return state.contexts.count(device); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(::current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return std::exchange(::current_device, device); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* pointer) const override { Lock lock; return is_pinned((Address)pointer); }
  Device getDeviceFromPtr(void* pointer) const override {
    Lock lock;
    Block* block = block_at((Address)pointer);
    return Device(kCUDA, block ? block->device : 0);
  }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendHooks)
}  // namespace at

namespace {
// ---- tensors
Address data_of(const Tensor& t) { return (Address)t.storage().data_ptr().get() + t.storage_offset() * t.itemsize(); }
size_t span_of(const Tensor& t) {
  if (!t.numel()) return 0;
  size_t values = 1;
  for (int i = 0; i < t.dim(); i++) values += (t.size(i) - 1) * t.stride(i);
  return values * t.itemsize();
}
Tensor on_host(const Tensor& t) {  // the same memory as a tensor of the CPU
  Tensor same = at::from_blob((void*)data_of(t), t.sizes(), t.strides(), TensorOptions().dtype(t.dtype()).device(kCPU));
  return t.is_conj() ? same.conj() : same;
}

Tensor empty(SymIntArrayRef sizes, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kCUDA)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &device_memory, DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kCUDA)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &device_memory,
                                           DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (!to.numel()) return to;
  bool in = !from.is_cuda(), out = !to.is_cuda();
  int stream = clock_on((out ? from : to).device().index());
  Tensor host_to = out ? to : on_host(to), host_from = (in ? from : on_host(from)).expand(to.sizes());
  const Tensor& host_side = in ? from : to;
  Address start = data_of(host_side);
  size_t size = span_of(host_side);
  std::string op = std::string(in ? "copy in" : out ? "copy out" : "copy") + (non_blocking ? ", non-blocking" : "");
  bool pinned, delayed;
  uint64_t count;
  {
    Lock lock;
    pinned = (in || out) && is_pinned(start);
    delayed = pinned && non_blocking;
    count = launch(stream);
    state.launches["aten::copy_"]++;
    if (!in || pinned) access(stream, data_of(from), span_of(from), false, op, count);
    if (!out || pinned) access(stream, data_of(to), span_of(to), true, op, count);
    if (pinned)  // it reads what a copy out has brought, or writes what an earlier copy of its stream has read
      settle_where([&](const Copy& copy) {
        return meets(copy, start, size) && (in ? copy.to_host : count_in(state.clocks[stream], copy.stream) >= copy.count);
      });
  }
  host_to.copy_(host_from);
  if (delayed) {
    Lock lock;
    state.copies.push_back({stream, count, start, {(char*)start, (char*)start + size}, out, op});
    if (out) memset((void*)start, 0xCD, size);
  } else if (in || out) {
    Lock lock;
    say("wait: " + op + (pinned ? ", pinned" : ", pageable"));
    host_waits_for(Clock(state.clocks[stream]));
  }
  return to;
}

Scalar item(const Tensor& t) {
  {
    Lock lock;
    int stream = clock_on(t.device().index());
    say("wait: item");
    access(stream, data_of(t), span_of(t), false, "item", launch(stream));
    host_waits_for(Clock(state.clocks[stream]));
  }
  return at::_local_scalar_dense(on_host(t));
}

// ---- all other operations: their CPU kernels on the same memory
const std::set<std::string> WAITING = {
    "aten::bincount",     "aten::equal",         "aten::is_nonzero",         "aten::masked_select", "aten::nonzero",
    "aten::_unique2",     "aten::unique_dim",    "aten::unique_consecutive", "aten::repeat_interleave.Tensor"};

struct Argument { Tensor device, host; bool writes; };

struct Call {
  std::string op;
  std::vector<Argument> arguments;
  std::vector<Tensor> of_cpu;
  int device = -1;

  Tensor take(const Tensor& t, bool writes) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) {
      of_cpu.push_back(t);
      return t;
    }
    TORCH_CHECK(device < 0 || device == t.device().index() || !t.dim(),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and ",
                t.device(), "! (", op, ")");
    if (device < 0 || t.dim()) device = t.device().index();
    arguments.push_back({t, writes && !t.numel() ? at::empty(t.sizes(), t.options().device(kCPU)) : on_host(t), writes});
    return arguments.back().host;
  }

  Tensor give(const Tensor& t, int stream) {  // a result as a tensor of the device
    if (!t.defined()) return t;
    for (auto& x : arguments)
      if (x.host.is_same(t)) return x.device;
    for (auto& x : of_cpu)
      if (x.is_same(t)) return t;
    for (auto& x : arguments)
      if (t.numel() && t.storage().data_ptr().get() == x.host.storage().data_ptr().get())
        return at::as_strided(x.device, t.sizes(), t.strides(), x.device.storage_offset() + t.storage_offset());
    Tensor made = at::empty_strided(t.sizes(), t.strides(), t.options().device(Device(kCUDA, device)));
    if (t.numel()) {
      on_host(made).copy_(t);
      Lock lock;
      access(stream, data_of(made), span_of(made), true, op, state.clocks[stream][stream]);
    }
    return made;
  }
};

// Replace each tensor of a value: alone, in a list, or in a list with gaps.
template <class Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(change(t));
    return list;
  }
  return value;
}

void run_on_host(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  const auto& schema = handle.schema();
  const auto& name = schema.operator_name();
  Call call{name.overload_name.empty() ? name.name : name.name + "." + name.overload_name};
  bool waits = WAITING.count(name.name) || WAITING.count(call.op);
  if (at::globalContext().deterministicAlgorithms() && state.nondeterministic.count(name.name))
    at::globalContext().alertNotDeterministic(call.op);

  size_t count = schema.arguments().size(), first = stack->size() - count;
  if (call.op == "aten::convolution")
    TORCH_CHECK((*stack)[first].toTensor().scalar_type() == (*stack)[first + 1].toTensor().scalar_type(),
                "Input type and weight type should be the same");
  std::optional<Device> asked;
  std::vector<std::string> waited;
  for (size_t i = 0; i < count; i++) {
    IValue& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    bool writes = alias && alias->isWrite();
    if (value.isOptionalTensorList()) {  // of an index: masks make the host wait, indices of the host are copied
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : value.toOptionalTensorVector()) {
        bool there = t && t->defined();
        if (there && (t->scalar_type() == kBool || t->scalar_type() == kByte)) waited.push_back(call.op + " by a mask");
        if (there && !t->is_cuda()) waited.push_back(call.op + " by the host's indices");
        list.push_back(there && t->is_cuda() ? call.take(*t, false) : t);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      asked = value.toDevice();
      value = Device(kCPU);
    } else {
      value = changed(value, [&](const Tensor& t) { return call.take(t, writes); });
    }
  }
  for (auto& t : call.of_cpu)
    TORCH_CHECK(!t.dim() || call.device < 0, "Expected all tensors to be on the same device, but found at least two ",
                "devices, cuda:", call.device, " and cpu! (", call.op, ")");
  if (call.device < 0) call.device = asked && asked->has_index() ? asked->index() : current_device;
  int stream = clock_on(call.device);
  {
    Lock lock;
    fail_if_told(call.op);
    state.contexts.insert(call.device);
    state.launches[call.op]++;
    uint64_t now = launch(stream);
    for (auto& x : call.arguments) access(stream, data_of(x.device), span_of(x.device), x.writes, call.op, now);
    for (auto& what : waited) say("wait: " + what);
    if (waits) say("wait: " + call.op);
    if (waits || !waited.empty()) host_waits_for(Clock(state.clocks[stream]));
  }
  handle.callBoxed(stack);
  for (auto& x : call.arguments)
    if (x.writes && !x.device.numel() && x.host.numel()) {  // `out=` of an empty tensor
      x.device.resize_(x.host.sizes());
      on_host(x.device).copy_(x.host);
    }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = changed((*stack)[i], [&](const Tensor& t) { return call.give(t, stream); });
}

const Tensor& resize_(const Tensor& t, SymIntArrayRef sizes, std::optional<MemoryFormat> format) {
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  size_t bytes = c10::multiply_integers(shape) * t.itemsize();
  Storage storage = t.storage();
  if (bytes > storage.nbytes()) {
    DataPtr larger = device_memory.allocate(bytes);
    if (storage.nbytes()) memcpy(larger.get(), storage.data_ptr().get(), storage.nbytes());
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(bytes);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  if (format && *format != MemoryFormat::Preserve) t.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return t;
}

Tensor& set_storage(Tensor& t, Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return t;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_local_scalar_dense", &item);
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("resize_", &resize_);
  m.impl("view", [](const Tensor& t, IntArrayRef sizes) { return at::native::view(t, sizes); });
  m.impl("as_strided", [](const Tensor& t, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(t, sizes, strides, offset);
  });
  m.impl("_reshape_alias", [](const Tensor& t, IntArrayRef sizes, IntArrayRef strides) {
    return at::native::_reshape_alias(t, sizes, strides);
  });
  m.impl("unfold", [](const Tensor& t, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(t, dim, size, step);
  });
  m.impl("set_.source_Storage", [](Tensor& t, Storage storage) -> Tensor& {
    int64_t values = storage.nbytes() / t.itemsize();
    return set_storage(t, std::move(storage), 0, {values}, {1});
  });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& t, Storage storage, SymInt offset, SymIntArrayRef sizes, SymIntArrayRef strides) -> Tensor& {
           return set_storage(t, std::move(storage), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(sizes),
                              C10_AS_INTARRAYREF_SLOW(strides));
         });
  m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& source) -> Tensor& {
    return set_storage(t, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  });
  m.impl("record_stream", [](Tensor& t, Stream stream) {
    Guard().recordDataPtrOnStream(t.storage().data_ptr(), stream);
  });
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kCUDA, &device_memory, 1);
  m.def("has_cuda", [] { return at::detail::getCUDAHooks().hasCUDA(); });
  m.def("listen", [](pybind11::object listener) { state.listener = listener.release().ptr(); });
  m.def("set_devices", [](int count) { state.devices = count; });
  m.def("set_total", [](size_t bytes) { state.total = bytes; });
  m.def("set_query", [](std::string answer) { state.query = answer; });
  m.def("set_nondeterministic", [](std::set<std::string> ops) { state.nondeterministic = ops; });
  m.def("fail_next", [](std::string op, std::string kind, std::string message) { state.failures[op] = {kind, message}; });
  m.def("launches", [] { return state.launches; });
  m.def("contexts", [] { return state.contexts; });
  m.def("make_context", [](int device) { state.contexts.insert(device); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = device; });
  m.def("current_stream", [](int device) { return stream_of(device); });
  m.def("set_stream", [](int device, StreamId id) { current_streams[device] = id; });
  m.def("synchronize", [] { Guard().synchronizeDevice(0); });
  m.def("memory", [](int device) {
    Memory& memory = state.memory[device];
    return std::make_tuple(memory.allocated, memory.peak, memory.reserved, state.total);
  });
  m.def("reset_peak", [](int device) { state.memory[device].peak = state.memory[device].allocated; });
  m.def("on_host", &on_host);
  m.def("access", [](const Tensor& t, bool writes, const std::string& op) {  // of an operation outside torch
    Lock lock;
    int stream = clock_on(t.device().index());
    access(stream, data_of(t), span_of(t), writes, op, launch(stream));
  });
}

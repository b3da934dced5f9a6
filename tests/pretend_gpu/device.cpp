// torch's side of the pretend GPU: a device under CUDA's key in torch's CPU build. `device.py` keeps its memory, streams
// and events, and runs its kernels; the functions of it that stand here as `ask("name", ...)` do what the name says.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>

namespace {
using namespace at;
using c10::Stream;

thread_local int current_device = 0;
thread_local std::map<int, c10::StreamId> current_streams;  // 0, the default stream, where none was set
std::atomic<int> devices = 1, streams = 8;                  // the numbers below are those of devices' default streams
std::atomic<PyObject*> keeper = nullptr;                    // the module; null until it is there, and at the end

template <class Answer = bool, class... Given>
Answer ask(const char* function, Given... given) {
  if (!keeper) return Answer();
  pybind11::gil_scoped_acquire interpreter;
  pybind11::error_scope of_callers;
  return pybind11::handle(keeper).attr(function)(given...).template cast<Answer>();
}
int number(int device) { return current_streams[device] ? int(current_streams[device]) : device; }
int number(const Stream& stream) { return stream.id() ? int(stream.id()) : stream.device_index(); }

// Memory of the device, or pinned memory of the host.
struct Memory final : c10::Allocator {
  const bool pinned;
  explicit Memory(bool pinned) : pinned(pinned) {}
  DataPtr allocate(size_t size) override {
    int device = current_device;
    void* start = (void*)ask<size_t>("allocate", size, pinned, device, number(device));
    return {start, start, &release, pinned ? Device(kCPU) : Device(kCUDA, device)};
  }
  static void release(void* start) {
    if (start) ask("free", (size_t)start);
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
Memory &device_memory = *new Memory(false), &pinned_memory = *new Memory(true);  // never destroyed: threads outlive them

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index(Device device) { return device.has_index() ? device.index() : current_device; }
  static Stream stream(int device, c10::StreamId id) { return Stream(Stream::UNSAFE, Device(kCUDA, device), id); }

  DeviceType type() const override { return kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return Device(kCUDA, current_device); }
  void setDevice(Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device next) const override {
    return Device(kCUDA, std::exchange(current_device, next.index()));
  }
  Stream getStream(Device device) const override { return stream(index(device), current_streams[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream(index(device), streams++); }
  Stream exchangeStream(Stream next) const override {
    return stream(next.device_index(), std::exchange(current_streams[next.device_index()], next.id()));
  }
  bool queryStream(const Stream& stream) const override { return ask("query_event", moment(stream)); }
  void synchronizeStream(const Stream& stream) const override { ask("synchronize_event", moment(stream)); }
  void synchronizeDevice(const DeviceIndex) const override { ask("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    ask("record_stream", (size_t)data.get(), number(stream));
  }
  // An event is a number, which stays after its end.
  static size_t moment(const Stream& stream) { return ask<size_t>("record", 0, number(stream)); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    *event = (void*)ask<size_t>("record", (size_t)*event, number(stream));
  }
  void block(void* event, const Stream& stream) const override { ask("wait_event", (size_t)event, number(stream)); }
  bool queryEvent(void* event) const override { return ask("query_event", (size_t)event); }
  void synchronizeEvent(void* event) const override { ask("synchronize_event", (size_t)event); }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return ask<double>("elapsed_time", (size_t)begin, (size_t)end);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}  // namespace

namespace at {
struct PretendHooks : CUDAHooksInterface {
  PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return devices; }
  DeviceIndex deviceCount() const override { return devices; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(::current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* pointer) const override { return ask("is_pinned", (size_t)pointer); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendHooks)
}  // namespace at

namespace {
constexpr DispatchKeySet KEY(DispatchKey::CUDA);

Tensor empty(SymIntArrayRef sizes, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kCUDA)));
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  return at::detail::empty_generic(shape, &device_memory, KEY, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kCUDA)));
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes), steps = C10_AS_INTARRAYREF_SLOW(strides);
  return at::detail::empty_strided_generic(shape, steps, &device_memory, KEY, c10::dtype_or_default(dtype));
}
void as_on_the_cpu(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  operation.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  for (auto of_shapes : {"view", "as_strided", "_reshape_alias", "unfold", "resize_", "set_.source_Storage",
                         "set_.source_Storage_storage_offset", "set_.source_Tensor"})
    m.impl(of_shapes, torch::CppFunction::makeFromBoxedFunction<&as_on_the_cpu>());
}

size_t data_of(const Tensor& t) { return (size_t)t.storage().data_ptr().get() + t.storage_offset() * t.itemsize(); }
Tensor on_host(const Tensor& t) {  // the same memory as a tensor of the CPU
  Tensor same = at::from_blob((void*)data_of(t), t.sizes(), t.strides(), TensorOptions().dtype(t.dtype()).device(kCPU));
  return t.is_conj() ? same.conj() : same;
}
std::pair<size_t, size_t> span_of(const Tensor& t) {  // from the first byte up to behind the last
  size_t values = t.numel() > 0;
  for (int i = 0; i < t.dim() && values; i++) values += (t.size(i) - 1) * t.stride(i);
  return {data_of(t), data_of(t) + values * t.itemsize()};
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kCUDA, &device_memory, 1);
  m.def("connect", [](pybind11::object module, int count) {
    devices = count;
    keeper = module.release().ptr();
    return at::detail::getCUDAHooks().hasCUDA();
  });
  m.def("disconnect", [] { keeper = nullptr; });
  m.def("current_device", [] { return current_device; });
  m.def("exchange_device", [](int next) { return next < 0 ? -1 : std::exchange(current_device, next); });
  m.def("current_stream", [](int device) { return current_streams[device]; });
  m.def("set_stream", [](int device, c10::StreamId id) { current_streams[device] = id; });
  m.def("stream_number", [](int device) { return number(device); });
  m.def("on_host", &on_host);
  m.def("span_of", &span_of);
  m.def("alert", [](const std::string& operation) { at::globalContext().alertNotDeterministic(operation); });
}

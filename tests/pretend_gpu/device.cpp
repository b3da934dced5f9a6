// torch's side of the pretend GPU: a device under CUDA's key. Functions of `device.py`, asked by name, keep all its state.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <map>

namespace {
using namespace at;
using c10::Stream;

thread_local int here = 0;                           // the current device
thread_local std::map<int, c10::StreamId> currents;  // its streams: 0, the default one, where none was set
thread_local std::string running;                    // the operation whose tensors the fallback copies
std::atomic<int> devices = 1, streams = 8;           // the numbers below are those of devices' default streams
std::atomic<PyObject*> answer = nullptr;             // of `device.py`; null until it is there, and at the end

template <class Answer = bool, class... Given>
Answer ask(const char* function, Given... given) {
  if (!answer) return Answer();
  pybind11::gil_scoped_acquire interpreter;
  pybind11::error_scope of_callers;
  return pybind11::handle(answer)(function, given...).template cast<Answer>();
}
int number(int device) { return currents[device] ? int(currents[device]) : device; }
int number(const Stream& stream) { return stream.id() ? int(stream.id()) : stream.device_index(); }

struct Memory final : c10::Allocator {  // of the device, or pinned memory of the host
  const bool pinned;
  explicit Memory(bool pinned) : pinned(pinned) {}
  DataPtr allocate(size_t size) override {
    void* start = (void*)ask<size_t>("allocate", size, pinned, here, number(here));
    return {start, start, &release, pinned ? Device(kCPU) : Device(kCUDA, here)};
  }
  static void release(void* start) { start && ask("free", (size_t)start); }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
Memory &device_memory = *new Memory(false), &pinned_memory = *new Memory(true);  // never destroyed: threads outlive them

struct Guard final : c10::impl::DeviceGuardImplInterface {  // an event is a number, which stays after its end
  static int index(Device device) { return device.has_index() ? device.index() : here; }
  static Stream stream(int device, c10::StreamId id) { return Stream(Stream::UNSAFE, Device(kCUDA, device), id); }

  DeviceType type() const override { return kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return Device(kCUDA, here); }
  void setDevice(Device device) const override { here = index(device); }
  void uncheckedSetDevice(Device device) const noexcept override { here = index(device); }
  Device exchangeDevice(Device next) const override { return Device(kCUDA, std::exchange(here, index(next))); }
  Stream getStream(Device device) const override { return stream(index(device), currents[index(device)]); }
  Stream getNewStream(Device device, int) const override { return stream(index(device), streams++); }
  Stream exchangeStream(Stream next) const override {
    return stream(next.device_index(), std::exchange(currents[next.device_index()], next.id()));
  }
  void synchronizeStream(const Stream& s) const override { synchronizeEvent((void*)ask<size_t>("record", 0, number(s))); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    ask("record_stream", (size_t)data.get(), number(stream));
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    *event = (void*)ask<size_t>("record", (size_t)*event, number(stream));
  }
  void block(void* event, const Stream& stream) const override { ask("wait_event", (size_t)event, number(stream)); }
  bool queryEvent(void* event) const override { return ask("query_event", (size_t)event); }
  void synchronizeEvent(void* event) const override { ask("synchronize_event", (size_t)event); }
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
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* pointer) const override { return ask("is_pinned", (size_t)pointer); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendHooks)
}  // namespace at

namespace {
constexpr DispatchKeySet KEY(DispatchKey::CUDA);

Tensor empty(SymIntArrayRef sizes, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(kCUDA)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &device_memory, KEY, dtype_or_default(dtype), format);
}
Tensor empty_strided(SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(kCUDA)));
  auto shape = C10_AS_INTARRAYREF_SLOW(sizes), steps = C10_AS_INTARRAYREF_SLOW(strides);
  return at::detail::empty_strided_generic(shape, steps, &device_memory, KEY, dtype_or_default(dtype));
}
Tensor on_host(const Tensor& t) {  // the same memory as a tensor of the CPU
  auto start = (char*)t.storage().mutable_data() + t.storage_offset() * t.itemsize();
  Tensor same = at::from_blob(start, t.sizes(), t.strides(), TensorOptions().dtype(t.dtype()).device(kCPU));
  return t.is_conj() ? same.conj() : same;
}
Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel()) ask("copy", to, from, non_blocking, running);
  return to;
}
void of_shapes(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  operation.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
}
// All other operations run the CPU's kernel on copies, which `copy` notes as accesses of the operation.
void compute(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  std::vector<Tensor> tensors;
  for (auto& value : torch::jit::last(*stack, operation.schema().arguments().size())) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    if (value.isTensorList() || value.isOptionalTensorList())
      for (const IValue& each : value.toListRef()) tensors.push_back(each.isTensor() ? each.toTensor() : Tensor());
  }
  auto name = operation.schema().operator_name();
  auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
  if (ask("begin", full, tensors)) at::globalContext().alertNotDeterministic(full);
  running = full;
  auto end = c10::make_scope_exit([] { running.clear(); });
  bool moves = full == "aten::native_batch_norm" && torch::jit::peek(*stack, 3, 8).isTensor();  // which no schema says
  auto legit = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_native_batch_norm_legit", "");
  at::native::cpu_fallback(moves ? legit : operation, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy);
  m.impl("_copy_from_and_resize", [](const Tensor& from, const Tensor& to) {
    return to.sizes() == from.sizes() ? to.copy_(from) : to.resize_(from.sizes()).copy_(from);
  });
  m.impl("record_stream", [](Tensor& t, Stream stream) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), stream); });
  for (auto name : {"convolution", "convolution_backward"})  // which choose a library by the device
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  for (auto name : {"view", "as_strided", "_reshape_alias", "unfold", "resize_", "set_.source_Storage",
                    "set_.source_Storage_storage_offset", "set_.source_Tensor"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&of_shapes>());
}
}  // namespace

PYBIND11_MODULE(pretend_device, m) {
  c10::SetAllocator(kCUDA, &device_memory, 1);
  m.def("connect", [](pybind11::object function, int count) {
    devices = count;
    answer = function.release().ptr();
    return at::detail::getCUDAHooks().hasCUDA();
  });
  m.def("disconnect", [] { answer = nullptr; });
  m.def("stream_number", [](int device) { return number(device); });
  m.def("on_host", &on_host);
}

// The update of all parameters, in one launch for up to kTableTensors of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gpu.h"
#include "tensors.h"

namespace {

// Calls launch(updates) for tensors of one kind, a table at a time.
class Tables {
 public:
  void add(const Tensor &gradient, const Tensor *parameter, const Tensor *velocity, const Tensor *master, float decay) {
    if (tables_.empty() || tables_.back().count == kTableTensors) tables_.emplace_back();
    Updates &table = tables_.back();
    const int t = table.count++;
    table.gradient[t] = address(gradient, gradient.numel());
    table.parameter[t] = parameter ? address(*parameter, gradient.numel()) : nullptr;
    table.velocity[t] = velocity ? floats(*velocity, gradient.numel()) : nullptr;
    table.master[t] = master ? floats(*master, gradient.numel()) : nullptr;
    table.size[t] = static_cast<int>(gradient.numel());
    table.decay[t] = decay;
  }
  template <class Launch>
  void launch(const Launch &launch) {
    for (Updates &table : tables_) launch(table);
  }

 private:
  static void *address(const Tensor &tensor, int64_t size) {
    void *data = const_cast<void *>(tensor.data());
    if (tensor.numel() != size) PD_THROW("an update's tensors are not all of one size");
    if (size >= 1 << 30) PD_THROW("the fused update takes parameters of less than 2^30 elements");
    if (reinterpret_cast<uintptr_t>(data) % kVectorBytes)
      PD_THROW("an update's tensor begins inside a vector of memory");
    return data;
  }

  static float *floats(const Tensor &tensor, int64_t size) {
    if (tensor.dtype() != DataType::FLOAT32) PD_THROW("an update's velocity or master is not of float32");
    return static_cast<float *>(address(tensor, size));
  }

  std::vector<Updates> tables_;
};

std::vector<unsigned> update_grid() { return {static_cast<unsigned>(Gpu::get().blocks()), 1}; }
std::vector<unsigned> update_block() { return {kMaxThreads, 1}; }

// Whether all gradients are finite; the loss scale follows. Returns 1 / the scale of these gradients, 0 if some are
// not.
Tensor check(const Tensors &gradients, Tensor &scale, Tensor &good, Tensor &bad, LossScaling rule) {
  Tensor unscale = paddle::empty({1}, DataType::FLOAT32, scale.place());
  float *s = scale.data<float>(), *u = unscale.data<float>();
  int *g = good.data<int>(), *b = bad.data<int>();
  if (scale.is_gpu()) {
    std::map<std::string, Tables> by_type;
    for (const Tensor &gradient : gradients) by_type[suffix(gradient)].add(gradient, nullptr, nullptr, nullptr, 0);
    void *overflow = Gpu::get().overflow();
    for (auto &[type, tables] : by_type) {
      const std::string name = "check_gradients" + type;
      tables.launch([&](Updates &updates) {
        Gpu::get().launch(name, scale, update_grid(), update_block(), {&updates, &overflow});
      });
    }
    Gpu::get().launch("follow_loss_scale", scale, {1, 1}, {1, 1}, {&overflow, &rule, &s, &g, &b, &u});
    return unscale;
  }
  bool is_finite = true;
  for (const Tensor &gradient : gradients) {
    require_float32(gradient);
    const float *values = data<float>(gradient);
    is_finite &= std::all_of(values, values + gradient.numel(), [](float value) { return std::isfinite(value); });
  }
  *u = is_finite ? 1 / *s : 0;
  rule.follow(!is_finite, s, g, b);
  return unscale;
}

// Momentum without Nesterov's change. `masters`: float32 parameters that those of another type are copies of.
void update(Tensors &parameters, const Tensors &gradients, Tensors &velocities, Tensors *masters, const Tensor &rate,
            const paddle::optional<Tensor> &unscale, float mu, const std::vector<float> &decays) {
  if (gradients.size() != parameters.size() || velocities.size() != parameters.size() ||
      decays.size() != parameters.size() || (masters && masters->size() != parameters.size()))
    PD_THROW("an update needs a gradient, a velocity and a decay for each parameter");
  const float *lr = rate.data<float>(), *factor = unscale ? unscale->data<float>() : nullptr;
  if (rate.is_gpu()) {
    std::map<std::string, Tables> by_type;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (gradients[i].dtype() != parameters[i].dtype()) PD_THROW("a gradient is not of its parameter's type");
      if (!masters && parameters[i].dtype() != DataType::FLOAT32) PD_THROW("a parameter lacks its float32 master");
      by_type[suffix(parameters[i])].add(gradients[i], &parameters[i], &velocities[i],
                                         masters ? &masters->at(i) : nullptr, decays[i]);
    }
    for (auto &[type, tables] : by_type) {
      const std::string name = (masters ? "momentum_masters" : "momentum") + type;
      tables.launch([&](Updates &updates) {
        Gpu::get().launch(name, rate, update_grid(), update_block(), {&updates, &lr, &factor, &mu});
      });
    }
    return;
  }
  if (factor && *factor == 0) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    require_float32(gradients[i]);
    float *p = parameters[i].data<float>(), *v = velocities[i].data<float>();
    const float *g = data<float>(gradients[i]);
    for (int64_t k = 0; k < parameters[i].numel(); ++k) {
      v[k] = mu * v[k] + (g[k] * (factor ? *factor : 1) + decays[i] * p[k]);
      p[k] -= *lr * v[k];
      if (masters) masters->at(i).data<float>()[k] = p[k];
    }
  }
}

}  // namespace

// Operators that follow the backward pass: the check of all gradients with the loss scale, and the optimizers. They take
// the tensors of all parameters at once, launch the kernels of update.cu for a table of them at a time, or call the
// reference on the CPU.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gpu.h"
#include "reference/update.h"
#include "tensors.h"

namespace {

// The arguments of one kernel's launches: tensors of one data type, divided into tables.
template <class Table>
class Tables {
 public:
  // `state`: the tensors of Table::state. The first two are as large as the parameter, the others have one element.
  void add(const Tensor &gradient, const Tensor *parameter, const Tensor *master, std::vector<const Tensor *> state,
           float decay) {
    if (tables_.empty() || tables_.back().count == Table::kTensors) tables_.emplace_back();
    Table &table = tables_.back();
    const int t = table.count++;
    table.gradient[t] = address(gradient, gradient.numel());
    table.parameter[t] = parameter ? address(*parameter, gradient.numel()) : nullptr;
    table.master[t] = master ? floats(*master, gradient.numel()) : nullptr;
    for (size_t i = 0; i < state.size(); ++i) table.state[i][t] = floats(*state[i], i < 2 ? gradient.numel() : 1);
    table.size[t] = static_cast<int>(gradient.numel());
    table.decay[t] = decay;
  }

  // Calls launch(updates) for each table.
  template <class Launch>
  void launch(const Launch &launch) {
    for (Table &table : tables_) launch(table);
  }

 private:
  static void *address(const Tensor &tensor, int64_t size) {
    void *data = const_cast<void *>(tensor.data());
    if (!tensor.is_gpu()) PD_THROW("an update's tensor is not on the GPU");
    if (tensor.numel() != size) PD_THROW("an update's tensors differ in size");
    if (size >= 1 << 30) PD_THROW("the fused update takes parameters of less than 2^30 elements");
    if (reinterpret_cast<uintptr_t>(data) % kVectorBytes)
      PD_THROW("an update's tensor begins inside a vector of memory");
    return data;
  }

  static float *floats(const Tensor &tensor, int64_t size) {
    if (tensor.dtype() != DataType::FLOAT32) PD_THROW("an update's state or master is not of float32");
    return static_cast<float *>(address(tensor, size));
  }

  std::vector<Table> tables_;
};

// The tables of all parameters by the end of their kernel's name, "_f16" for example.
template <class Table>
std::map<std::string, Tables<Table>> tables_by_type(const Tensors &parameters, const Tensors &gradients,
                                                    const Tensors *masters, std::vector<const Tensors *> state,
                                                    const std::vector<float> &decays) {
  std::map<std::string, Tables<Table>> by_type;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (gradients[i].dtype() != parameters[i].dtype()) PD_THROW("a gradient is not of its parameter's type");
    if (!masters && parameters[i].dtype() != DataType::FLOAT32) PD_THROW("a parameter lacks its float32 master");
    std::vector<const Tensor *> of_parameter;
    for (const Tensors *tensors : state) of_parameter.push_back(&tensors->at(i));
    by_type[suffix(parameters[i])].add(gradients[i], &parameters[i], masters ? &masters->at(i) : nullptr, of_parameter,
                                       decays.at(i));
  }
  return by_type;
}

void require_one_each(const Tensors &parameters, std::vector<const Tensors *> others, const Tensors *masters,
                      const std::vector<float> &decays) {
  if (masters) others.push_back(masters);
  bool matches = decays.size() == parameters.size();
  for (const Tensors *tensors : others) matches &= tensors->size() == parameters.size();
  if (!matches) PD_THROW("an update needs a gradient, its state and a decay for each parameter");
}

std::vector<unsigned> update_grid() { return {static_cast<unsigned>(Gpu::get().blocks()), 1}; }
std::vector<unsigned> update_block() { return {kMaxThreads, 1}; }

// Checks that all gradients are finite, then updates the loss scale and its counters in place. Returns [1]: 1 / the
// scale that these gradients have, 0 if some are not finite.
std::vector<Tensor> CheckFinite(const Tensors &gradients, Tensor &scale, Tensor &good_steps, Tensor &bad_steps,
                                int raise_after_steps, int lower_after_steps, float raise_by, float lower_by) {
  LossScaling rule = {raise_after_steps, lower_after_steps, raise_by, lower_by};
  Tensor unscale = paddle::empty({1}, DataType::FLOAT32, scale.place());
  float *s = scale.data<float>(), *u = unscale.data<float>();
  int *good = good_steps.data<int>(), *bad = bad_steps.data<int>();
  if (scale.is_gpu()) {
    std::map<std::string, Tables<MomentumUpdates>> by_type;
    for (const Tensor &gradient : gradients) by_type[suffix(gradient)].add(gradient, nullptr, nullptr, {}, 0);
    void *overflow = Gpu::get().overflow();
    for (auto &[type, tables] : by_type) {
      const std::string name = "check_gradients" + type;
      tables.launch([&](MomentumUpdates &updates) {
        Gpu::get().launch(name, scale, update_grid(), update_block(), {&updates, &overflow});
      });
    }
    Gpu::get().launch("follow_loss_scale", scale, {1, 1}, {1, 1}, {&overflow, &rule, &s, &good, &bad, &u});
    return {unscale};
  }
  bool is_finite = true;
  for (const Tensor &gradient : gradients) {
    require_float32(gradient);
    is_finite &= reference::is_finite(data<float>(gradient), gradient.numel());
  }
  *u = is_finite ? 1 / *s : 0;
  rule.follow(!is_finite, s, good, bad);
  return {unscale};
}

// Momentum, in place. `masters`: the float32 parameters, of which `parameters` are copies
// in a narrower type; null where the parameters themselves are float32. `unscale` is what CheckFinite returned.
void momentum(Tensors &parameters, const Tensors &gradients, Tensors &velocities, Tensors *masters, const Tensor &rate,
              const paddle::optional<Tensor> &unscale, float mu, bool nesterov, const std::vector<float> &decays) {
  require_one_each(parameters, {&gradients, &velocities}, masters, decays);
  const float *lr = rate.data<float>(), *factor = unscale ? unscale->data<float>() : nullptr;
  if (rate.is_gpu()) {
    for (auto &[type, tables] :
         tables_by_type<MomentumUpdates>(parameters, gradients, masters, {&velocities}, decays)) {
      const std::string name = (masters ? "momentum_masters" : "momentum") + type;
      tables.launch([&](MomentumUpdates &updates) {
        Gpu::get().launch(name, rate, update_grid(), update_block(), {&updates, &lr, &factor, &mu, &nesterov});
      });
    }
    return;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    require_float32(gradients[i]);
    reference::momentum(data<float>(gradients[i]), parameters[i].numel(), *lr, factor ? *factor : 1, mu, nesterov, decays[i],
                        velocities[i].data<float>(), parameters[i].data<float>(),
                        masters ? masters->at(i).data<float>() : nullptr);
  }
}

void Momentum(Tensors &parameters, const Tensors &gradients, Tensors &velocities, const Tensor &rate,
              const paddle::optional<Tensor> &unscale, float mu, bool nesterov, const std::vector<float> &decays) {
  momentum(parameters, gradients, velocities, nullptr, rate, unscale, mu, nesterov, decays);
}

void MomentumMasters(Tensors &parameters, const Tensors &gradients, Tensors &velocities, Tensors &masters,
                     const Tensor &rate, const paddle::optional<Tensor> &unscale, float mu, bool nesterov,
                     const std::vector<float> &decays) {
  momentum(parameters, gradients, velocities, &masters, rate, unscale, mu, nesterov, decays);
}

// AdamW or LAMB, in place; arguments as those of momentum, and the powers of the betas, one element per parameter.
void adam(bool is_lamb, Tensors &parameters, const Tensors &gradients, Tensors &moments1, Tensors &moments2,
          Tensors &powers1, Tensors &powers2, Tensors *masters, const Tensor &rate,
          const paddle::optional<Tensor> &unscale, Adam rule, const std::vector<float> &decays) {
  require_one_each(parameters, {&gradients, &moments1, &moments2, &powers1, &powers2}, masters, decays);
  const float *lr = rate.data<float>(), *factor = unscale ? unscale->data<float>() : nullptr;
  if (rate.is_gpu()) {
    void *partial = Gpu::get().partial();  // which has kMaxLanes * kVectorBytes floats per block
    static_assert(2 * AdamUpdates::kTensors <= kMaxLanes * kVectorBytes, "LAMB's sums exceed the scratch memory");
    for (auto &[type, tables] : tables_by_type<AdamUpdates>(
             parameters, gradients, masters, {&moments1, &moments2, &powers1, &powers2}, decays)) {
      const std::string end = (masters ? "_masters" : "") + type;
      tables.launch([&](AdamUpdates &updates) {
        const auto launch = [&](const std::string &name, std::vector<void *> arguments) {
          Gpu::get().launch(name, rate, update_grid(), update_block(), std::move(arguments));
        };
        if (is_lamb) {
          launch("lamb_moments" + end, {&updates, &rule, &factor, &partial});
          launch("lamb" + end, {&updates, &rule, &lr, &factor, &partial});
        } else {
          launch("adamw" + end, {&updates, &rule, &lr, &factor});
        }
        Gpu::get().launch("advance_powers", rate, {1, 1}, {AdamUpdates::kTensors, 1}, {&updates, &rule, &factor});
      });
    }
    return;
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    require_float32(gradients[i]);
    reference::adam(data<float>(gradients[i]), parameters[i].numel(), *lr, factor ? *factor : 1, rule, is_lamb,
                    decays[i], moments1[i].data<float>(), moments2[i].data<float>(), powers1[i].data<float>(),
                    powers2[i].data<float>(), parameters[i].data<float>(),
                    masters ? masters->at(i).data<float>() : nullptr);
  }
}

template <bool kIsLamb>
void AdamPlain(Tensors &parameters, const Tensors &gradients, Tensors &moments1, Tensors &moments2, Tensors &powers1,
               Tensors &powers2, const Tensor &rate, const paddle::optional<Tensor> &unscale, float beta1, float beta2,
               float epsilon, const std::vector<float> &decays) {
  adam(kIsLamb, parameters, gradients, moments1, moments2, powers1, powers2, nullptr, rate, unscale,
       {beta1, beta2, epsilon}, decays);
}

template <bool kIsLamb>
void AdamMasters(Tensors &parameters, const Tensors &gradients, Tensors &moments1, Tensors &moments2, Tensors &powers1,
                 Tensors &powers2, Tensors &masters, const Tensor &rate, const paddle::optional<Tensor> &unscale,
                 float beta1, float beta2, float epsilon, const std::vector<float> &decays) {
  adam(kIsLamb, parameters, gradients, moments1, moments2, powers1, powers2, &masters, rate, unscale,
       {beta1, beta2, epsilon}, decays);
}

}  // namespace

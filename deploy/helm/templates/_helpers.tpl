{{/* The beginning of all names. */}}
{{- define "base-rl.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of a part: a list of the root and the part's name. */}}
{{- define "base-rl.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: base-rl
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "base-rl.labels" -}}
{{- $root := index . 0 -}}
{{ include "base-rl.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{/* What every pod has: the user of the images, no rights, and where it may run. */}}
{{- define "base-rl.pod" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  # Volumes with many versions would take minutes at every start.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "base-rl.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Resources of a container with GPUs: a list of its resources and the number. */}}
{{- define "base-rl.resources" -}}
{{- $resources := deepCopy (index . 0) -}}
{{- $gpus := int (index . 1) -}}
{{- if $gpus -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" $gpus) (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "base-rl.environment" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "base-rl.secrets" -}}
- name: secrets
  secret:
    secretName: {{ .Values.secret }}
    defaultMode: 0440
{{- end -}}

{{/* The volumes of all pods. */}}
{{- define "base-rl.volumes" -}}
- name: data
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-data" (include "base-rl.name" .)) .Values.volumes.data.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "base-rl.name" .)) .Values.volumes.models.existingClaim }}
- name: tmp
  emptyDir: {sizeLimit: 8Gi}
{{- end -}}

{{- define "base-rl.mounts" -}}
- {name: data, mountPath: /data}
- {name: models, mountPath: /models}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{/* Variables of the proxy and the workers. */}}
{{- define "base-rl.store" -}}
- name: BASE_RL_DATABASE__URL
  value: {{ .Values.database | quote }}
- name: BASE_RL_DATABASE__PASSWORD_FILE
  value: /run/secrets/postgres_password
{{- if .Values.broker }}
- name: BASE_RL_JOBS__BROKER
  value: {{ .Values.broker | quote }}
- name: BASE_RL_JOBS__BROKER_PASSWORD_FILE
  value: /run/secrets/redis_password
{{- end }}
{{- end -}}

{{/* The configuration file of the proxies and the workers. */}}
{{- define "base-rl.config" -}}
{{- with .Values.config }}{{ . | trim }}

{{ end -}}
{{- $name := include "base-rl.name" . -}}
{{- range $number := until (int .Values.engine.replicas) }}
[engines.{{ $name }}-engine-{{ $number }}]
url = "http://{{ $name }}-engine-{{ $number }}.{{ $name }}-engine.{{ $.Release.Namespace }}.svc:30000"
{{ end -}}
{{- end -}}
